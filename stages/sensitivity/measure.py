"""Measures what each kind of codes does to the gradient, for each class of tensors by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf, sqrt
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
    rows = {key: _Row() for key in classes.members(kinds)}
    several = len(live) > 1
    runs: list[tuple[StepTensors, int | None]] = [(each, None) for each in live]
    if not several:
        runs += [(live[0], seed) for seed in range(MOVED)]
    with around():
        for number, (each, seed) in enumerate(runs):
            forward = StoredForward(trace, each if seed is None else moved(each, seed), classes.everywhere(kinds))
            exact = forward.gradients(trace)
            norms = _norms(exact)
            for done, ((kind, name), row) in enumerate(rows.items(), 1):
                packed, frozen = classes.frozen(kind, name)
                own = {n: g for n, g in exact.items() if n not in frozen}
                found = forward.gradients(packed)
                row.add(own, found, norms, moved=seed is not None, spreads=several)
                del found, own  # before others are made
                progress(number * len(rows) + done, len(runs) * len(rows))
            del forward, exact  # likewise
    more = margin(len(live)) ** 2
    return [row.measured(*key, batches=len(live), more=more) for key, row in rows.items()]


@dataclass
class _Row:
    """What one kind does to one class, on the batches so far.

    Attributes:
        norms: sum over batches of the squared norm of each parameter's gradient.
        changes: largest squared change of each parameter's gradient.
        whole: largest squared change of all of them together.
        spreads: of the gradient without codes and with them.
    """

    norms: dict[str, float] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)
    whole: float = 0.0
    spreads: tuple[Spread, Spread] = field(default_factory=lambda: (Spread(), Spread()))

    def add(self, own: Gradients, found: Gradients, norms: Mapping[str, float], *, moved: bool, spreads: bool) -> None:
        """Add one batch; of moved weights the change counts beside their own gradient's norm."""
        changes = {name: _change(found[name], gradient) for name, gradient in own.items()}
        scale = 1.0
        if moved:
            norm = sum(norms[name] for name in own)
            scale = sum(self.norms.values()) / norm if 0 < norm < inf else 0.0
        else:
            self.norms = {name: self.norms.get(name, 0.0) + norms[name] for name in own}
        self.changes = {name: max(self.changes.get(name, 0.0), scale * change) for name, change in changes.items()}
        self.whole = max(self.whole, scale * sum(changes.values()))
        if spreads:
            for spread, gradients in zip(self.spreads, (own, found), strict=True):
                spread.add({name: gradients[name] for name in own})

    def measured(self, kind: str, tensors: str, *, batches: int, more: float) -> GradientError:
        """Return what was found, with a margin for other batches."""
        norm = sum(self.norms.values())
        scale = batches / norm if norm else 0.0
        plain, coded = (scale * spread.variance() for spread in self.spreads)
        return GradientError(
            kind,
            tensors,
            more * scale * self.whole,
            plain,
            coded,
            tuple(self.norms),
            tuple(more * scale * self.changes[name] for name in self.norms),
            tuple(value / norm if norm else 0.0 for value in self.norms.values()),
        )


def gradient_error(
    trace: TraceTables,
    packed: TraceTables,
    live: Sequence[StepTensors],
    beside: Sequence[StepTensors] = (),
    among: Sequence[Collection[str]] = (),
) -> float:
    """Return the relative error of the gradient under a rewrite: the norm of the change over the gradient's norm.

    Args:
        trace: the step as it was recorded.
        packed: the step with its rewrite.
        live: the model's tensors with those of a batch, for each batch that the change is measured on.
        beside: the same for the batches with whose gradients it is compared; by default those of `live`.
        among: sets of parameters: the error is that of the gradient of one of them, whichever is largest.
    """
    changes: list[dict[str, float]] = []
    norms: list[dict[str, float]] = []
    with forked_generators():
        for each in live:
            forward = StoredForward(trace, each, [packed])
            exact = forward.gradients(trace)
            found = forward.gradients(packed)
            changes.append({name: _change(found[name], gradient) for name, gradient in exact.items()})
            norms.append(_norms(exact))
        if beside:
            norms = [_norms(StoredForward(trace, each, []).gradients(trace)) for each in beside]

    def error(names: Collection[str]) -> float:
        change, norm = (fmean(sum(of[name] for name in names) for of in each) for each in (changes, norms))
        return sqrt(change / norm) if norm else inf if change else 0.0

    return max(map(error, among or [list(changes[0])]))


def _norms(gradients: Gradients) -> dict[str, float]:
    return {name: _squared(gradient) for name, gradient in gradients.items()}


def _squared(gradient: torch.Tensor) -> float:
    return float(gradient.abs().double().square().sum())


def _change(found: torch.Tensor, exact: torch.Tensor) -> float:
    change = _squared(found - exact)
    return change if change == change else inf  # one of them is no number
