"""Measures what each kind of codes does to the gradient, for each class of tensors by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from statistics import fmean

import torch

from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite.lossy import Classes
from stowage.stages.sensitivity.interpreter import StepTensors, StoredForward
from stowage.stages.sensitivity.moved import moved
from stowage.stages.sensitivity.spread import Spread
from stowage.stages.structure.generators import forked_generators

Gradients = Mapping[str, torch.Tensor]

OTHER_DRAWS = 1.5
"""So much more is taken for batches, and draws of dropout, that nothing is measured on.

What codes change varies by some percent from batch to batch, and by a fifth in tensors of a few hundred elements. The
gradient's own norm may vary several times, so that changes are compared with its mean square.
"""

ONE_BATCH = 1.25
"""So many times that is taken where it is measured on one batch, which tells nothing of how much batches differ."""

MOVED = 3
"""So many times one batch is measured again with weights that are moved a little.

Codes that ReLU's backward reads change a gradient by whole elements, where rounding reaches 0: few of them on one
batch, a hundred times as many on another. Moved weights draw such elements anew, whatever a batch is made of.
"""


def margin(batches: int) -> float:
    """Return how many times what was measured on so many batches is predicted for others."""
    return OTHER_DRAWS * (ONE_BATCH if batches == 1 else 1.0)


def gradient_errors(
    trace: TraceTables,
    kinds: Iterable[str],
    live: Sequence[StepTensors],
    *,
    around: Callable[[], AbstractContextManager[object]] = forked_generators,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[GradientError]:
    """Measure the error of each class and kind, with nothing else packed.

    An error is the largest change of the gradient on any of the batches, with a margin for others, over the root mean
    square of the gradient's norm on all of them. Codes for what is frozen are measured where all of the class is
    frozen, without the gradients that nothing then computes. Beside it, of several batches, is told how much the
    gradient varies from batch to batch, with the codes and without.

    One batch alone is measured again with weights that are moved a little, each time beside the gradient of those
    weights: the largest ratio counts.

    Forward runs once for each batch, and backward once for each class and kind of each batch, one batch after the
    other: in the memory of a plain forward and backward and of about three gradients more, and where there is one
    batch once more the weights.

    Args:
        trace: the step as it was recorded.
        kinds: names of codecs.
        live: the model's tensors with those of a batch, for each batch.
        around: surrounds the work; restores the random generators.
        progress: called with the number of backward runs done and their total.
    """
    kinds = tuple(kinds)
    classes = Classes(trace)
    changes = dict.fromkeys(classes.members(kinds), 0.0)
    norms = dict.fromkeys(changes, 0.0)
    spreads = {key: (Spread(), Spread()) for key in changes} if len(live) > 1 else {}
    runs: list[tuple[StepTensors, int | None]] = [(each, None) for each in live]
    if len(live) == 1:
        runs += [(live[0], seed) for seed in range(MOVED)]
    with around():
        for number, (each, seed) in enumerate(runs):
            forward = StoredForward(trace, each if seed is None else moved(each, seed), classes.everywhere(kinds))
            exact = forward.gradients(trace)
            whole = _squared(exact)
            for done, (kind, name) in enumerate(changes, 1):
                packed, frozen = classes.frozen(kind, name)
                own = {n: g for n, g in exact.items() if n not in frozen}
                norm = whole - _squared({n: exact[n] for n in frozen if n in exact})
                found = forward.gradients(packed)
                change = squared_distance(found, own)
                if seed is None:
                    norms[kind, name] += norm
                else:
                    change *= norms[kind, name] / norm if 0 < norm < inf else 0.0
                changes[kind, name] = max(changes[kind, name], change)
                for spread, gradients in zip(spreads.get((kind, name), ()), (own, found), strict=False):
                    spread.add({n: gradients[n] for n in own})
                    del gradients
                del found, own  # before others are made
                progress(number * len(changes) + done, len(runs) * len(changes))
            del forward, exact  # likewise
    scales = {key: len(live) / norm if norm else 0.0 for key, norm in norms.items()}
    more = margin(len(live)) ** 2
    return [
        GradientError(*key, more * scales[key] * change, *(scales[key] * s.variance() for s in spreads.get(key, ())))
        for key, change in changes.items()
    ]


def gradient_error(
    trace: TraceTables, packed: TraceTables, live: Sequence[StepTensors], beside: Sequence[StepTensors] = ()
) -> float:
    """Return the relative error of the gradient under a rewrite: the norm of the change over the gradient's norm.

    Args:
        trace: the step as it was recorded.
        packed: the step with its rewrite.
        live: the model's tensors with those of a batch, for each batch that the change is measured on.
        beside: the same for the batches with whose gradients it is compared; by default those of `live`.
    """
    changes: list[float] = []
    norms: list[float] = []
    with forked_generators():
        for each in live:
            forward = StoredForward(trace, each, [packed])
            exact = forward.gradients(trace)
            changes.append(squared_distance(forward.gradients(packed), exact))
            norms.append(_squared(exact))
        if beside:
            norms = [_squared(StoredForward(trace, each, []).gradients(trace)) for each in beside]
    norm = fmean(norms)
    return (fmean(changes) / norm) ** 0.5 if norm else 0.0


def _squared(gradients: Gradients) -> float:
    return sum(float(g.abs().double().square().sum()) for g in gradients.values())


def squared_distance(found: Gradients, exact: Gradients) -> float:
    """Return the squared norm of the difference of two gradients; infinity where one of them is no number."""
    total = 0.0
    for name, gradient in exact.items():
        total += float((found[name] - gradient).abs().double().square().sum())
    return total if total == total else float("inf")
