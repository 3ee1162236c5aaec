"""Measures what forward saves where most of a model is frozen and what backward reads is kept in codes: SlimFit whole.

The classes of tensors are chosen within the default limit of the gradient's error, and of the choices that there are
the one is taken under which the worst mask saves least. Everything else is kept, as without codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stowage.flows.benchmarks.slimfit.models import Frozen, another
from stowage.flows.benchmarks.slimfit.saved import kept_plan, saved_bytes, saved_of_trace, worst
from stowage.stages.freezing.policies import active_count
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.lossy import GradientError, Lossy
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import PLAIN
from stowage.stages.rewrite import rewritten
from stowage.stages.rewrite.lossy import Classes, allowed, choices, described
from stowage.stages.sensitivity import StepTensors, gradient_errors
from stowage.stages.trace import trace_step

RATE = 0.9
"""The freezing rate F."""

KINDS = ("fixed8", "fixed8_unit", "fixed4", "int8", "int8_group", "int4_group", "relu1bit", "gelu2bit", "top10")
"""The paper's kinds of codes, and those that spare as much at a smaller error: each takes a backward for each class."""

NEITHER, FREEZING, CODES, BOTH = "neither", "freezing", "codes", "freezing and codes"


@dataclass(frozen=True)
class SavedInCodes:
    """What forward saves, with and without freezing and codes.

    Attributes:
        model: the model's label.
        units: kind and number of units.
        techniques: `neither`, `freezing`, `codes`, or both.
        rate: the freezing rate.
        mask: see `Saved`.
        predicted_bytes, measured_bytes: in memory between forward and backward, beside what is there between steps.
        scaled_gb: the measured bytes at the paper's batch, in GB; 0 without one.
        paper_gb: what the paper reports of it; 0 where it does not.
        error: the most that the gradient may change by, as was predicted.
        kept: kind and class of what is kept in codes.
    """

    model: str
    units: str
    techniques: str
    rate: float
    mask: str
    predicted_bytes: int
    measured_bytes: int
    scaled_gb: float = 0.0
    paper_gb: float = 0.0
    error: float = 0.0
    kept: tuple[str, ...] = ()


def saved_in_codes(
    model: Frozen,
    rate: float = RATE,
    lossy: Lossy | None = None,
    batches: int = 0,
    said: Callable[[str], None] = lambda text: None,
    **smaller: Any,
) -> Iterator[SavedInCodes]:
    """Yield what forward saves with nothing frozen and at one rate, as it is and in codes.

    Args:
        model: one of `MODELS`.
        rate: the freezing rate.
        lossy: the leave; by default `KINDS` within the default limit.
        batches: samples on which errors are measured; by default as many as the model has.
        said: receives what is going on.
        smaller: changes the model's configuration.
    """
    made, batch = model.make(model.batch, **smaller)
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    trace = trace_step(made, batch, optimizer=optimizer)
    lossy = lossy or Lossy(model.kinds or KINDS)
    errors = _errors(model, lossy, batches or model.measured, said, smaller)
    kinds = allowed(lossy.kinds, freezes=True)
    for share, techniques in ((0.0, (NEITHER, CODES)), (rate, (FREEZING, BOTH))):
        names = choices(trace, _alike(trace, kinds), errors, lossy, share)
        variant = min(names, key=lambda name: _worst_bytes(trace, name, share), default=PLAIN)
        for technique, name in zip(techniques, (PLAIN, variant), strict=True):
            kept, error = described(trace, name, errors)
            for row in saved_of_trace(model, rewritten(trace, name), (made, optimizer, batch), [share]):
                paper = model.paper_gb[technique == BOTH] if technique in (NEITHER, BOTH) else 0.0
                known = {key: value for key, value in asdict(row).items() if key != "rate"}
                yield SavedInCodes(**known, techniques=technique, rate=share, paper_gb=paper, error=error, kept=kept)


def _errors(
    model: Frozen, lossy: Lossy, batches: int, said: Callable[[str], None], smaller: Mapping[str, Any]
) -> list[GradientError]:
    """Measure what each kind of codes does to the gradient, sample by sample.

    A sample takes a fraction of the time of a batch; its gradient changes by no less than the mean of several.
    """
    made, batch = model.make(1, **smaller)
    trace = trace_step(made, batch, optimizer=torch.optim.SGD(made.parameters(), lr=1e-3))
    measured = [StepTensors.of(made, another(batch, seed)) for seed in range(batches)]

    def progress(done: int, total: int) -> None:
        if done % 50 == 0:
            said(f"{model.label}: {done} of {total} backwards to measure errors")

    return gradient_errors(trace, allowed(lossy.kinds, freezes=True), measured, progress=progress)


def _alike(trace: TraceTables, kinds: Sequence[str]) -> dict[str, Cost]:
    """Return costs with which bytes alone decide."""
    traces = [trace, *Classes(trace).everywhere(kinds)]
    return {c.signature: Cost(c.signature, "", 1e-6, 0, 0, 0, "roofline") for each in traces for c in each.calls}


def _worst_bytes(trace: TraceTables, variant: str, rate: float) -> int:
    """Return what the worst mask saves in a variant."""
    plan, border, _ = kept_plan(rewritten(trace, variant))
    saved, count = saved_bytes(plan, border), len(plan.units)
    return saved.under(worst(saved, count, active_count(count, rate)))
