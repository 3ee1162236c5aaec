"""Tells what saved values are for, and which of them freezing does not spare: SlimFit's static activations.

A value is static under a choice of units if backward reads it on its way to a unit that trains before it. Nothing here
knows which operators have such values; it follows from the guards of a plan. What values are for is told by the
operators of backward that read them under the choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stowage.flows.benchmarks.slimfit.models import Frozen
from stowage.flows.benchmarks.slimfit.saved import kept_plan, saved_bytes, worst
from stowage.stages.freezing.policies import active_count
from stowage.stages.freezing.projection import Guarded
from stowage.stages.rewrite.lossy import Classes
from stowage.stages.trace import trace_step

RATES = (0.0, 0.5, 0.9, 0.95)

OTHERS = "other operators"

NORMALISATIONS = "normalisations"

SEMI_STATIC = "normalisations, in top10 codes while frozen"
"""What `NORMALISATIONS` take if those that do not train keep a tenth of what they save: semi-static, in the paper's
word (section 5). Those that train keep everything beside the codes, which are made before it is known."""

_WHILE_FROZEN = "top10_frozen"

READERS: Mapping[str, tuple[str, ...]] = {
    NORMALISATIONS: ("native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward"),
    "activation functions": ("gelu_backward", "silu_backward", "tanh_backward", "threshold_backward"),
    "attention": ("_softmax_backward_data", "_safe_softmax", "_scaled_dot_product", "bmm", "baddbmm"),
    "dropout": ("native_dropout_backward",),
    "the loss": ("_log_softmax_backward_data", "nll_loss"),
    "matrix products with weights": ("mm", "addmm", "convolution_backward", "embedding_dense_backward"),
    "products of elements, as of dropout": ("mul",),
}
"""What values are for, by the operators that read them; a value that several read is for the first."""


@dataclass(frozen=True)
class Static:
    """What forward saves for some operators of backward.

    Attributes:
        model: the model's label.
        reader: what it is for: one of `READERS`, `OTHERS` or `SEMI_STATIC`, which is the first of them once more.
        rate: the freezing rate.
        nbytes: in memory between forward and backward under the choice of units that saves most.
    """

    model: str
    reader: str
    rate: float
    nbytes: int


def static_activations(model: Frozen, rates: Sequence[float] = RATES, **smaller: Any) -> Iterator[Static]:
    """Yield what forward saves for each kind of operators at each rate; `smaller` changes the model's configuration."""
    made, batch = model.make(model.batch, **smaller)
    trace = trace_step(made, batch, optimizer=torch.optim.SGD(made.parameters(), lr=1e-3))
    plan, border, _ = kept_plan(trace)
    saved, count = saved_bytes(plan, border), len(plan.units)
    for rate in rates:
        mask = worst(saved, count, active_count(count, rate))
        found = bytes_by_reader(plan, border, mask)
        for reader in (*READERS, OTHERS):
            if any(found.values()):
                yield Static(model.label, reader, rate, found[reader])
    for coded in Classes(trace).everywhere([_WHILE_FROZEN]):
        semi, semi_border, _ = kept_plan(coded)
        semi_saved = saved_bytes(semi, semi_border)
        for rate in rates:
            mask = worst(semi_saved, count, active_count(count, rate))
            spared = saved.under(mask) - semi_saved.under(mask)
            own = bytes_by_reader(plan, border, mask)[NORMALISATIONS]
            yield Static(model.label, SEMI_STATIC, rate, own - spared)


def bytes_by_reader(plan: Guarded, border: int, mask: int) -> Counter[str]:
    """Return the bytes that forward saves under a mask, by what they are for.

    Args:
        plan: a plan that keeps everything.
        border: its first row that is not forward.
        mask: what trains.
    """
    storages, made = plan.trace.storages, set[int]()
    targets: dict[int, list[str]] = {}
    for number, step in enumerate(plan.steps):
        if step.node < 0:
            continue
        node = plan.nodes[step.node]
        if number < border:
            made.update(s for s in node.creates if storages[s].role == "temporary")
        elif plan.guards.rows[number] & mask:
            for storage in made.intersection((*node.reads, *node.mutates)):
                targets.setdefault(storage, []).extend(plan.trace.calls[c].target for c in node.calls)
    found: Counter[str] = Counter()
    for storage, own in targets.items():
        found[_reader(own)] += storages[storage].nbytes
    return found


def _reader(targets: Sequence[str]) -> str:
    names = [target.split(".")[1] for target in targets]
    for reader, known in READERS.items():
        if any(name.startswith(known) for name in names):
            return reader
    return OTHERS
