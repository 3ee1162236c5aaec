"""Measures what forward saves where most of a model is frozen and what backward reads is kept in codes: SlimFit whole.

The classes of tensors are chosen within a limit of the gradient's error, and of the choices that there are the one is
taken under which the worst mask saves least. Everything else is kept, as without codes. With freezing, errors are those
of the units for which they are largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch

from stowage.flows.benchmarks.slimfit.models import Frozen, another
from stowage.flows.benchmarks.slimfit.saved import MASKS, ReadyStep, kept_plan, saved_bytes, worst
from stowage.flows.benchmarks.slimfit.saved_by_ils import LEARNING_RATE, steps_of_ils
from stowage.stages.freezing.errors import errors_under_masks
from stowage.stages.freezing.policies import active_count
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.lossy import MAX_GRADIENT_ERROR, GradientError, Lossy
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

LIMITS = (MAX_GRADIENT_ERROR, 0.5)
"""What the gradient may change by: the default, and so much that hardly anything is kept as it is.

The paper has no limit: it looks at the accuracy in the end.
"""

ILS_STEPS = 24
"""Steps of ILS whose units' mean is told."""

NEITHER, FREEZING, CODES, BOTH = "neither", "freezing", "codes", "freezing and codes"


@dataclass(frozen=True)
class SavedInCodes:
    """What forward saves, with and without freezing and codes.

    Attributes:
        model: the model's label.
        units: kind and number of units.
        techniques: `neither`, `freezing`, `codes`, or both.
        rate: the freezing rate.
        mask: see `Saved`; or `ILS`, the mean over steps with the units that it chose.
        predicted_bytes, measured_bytes: in memory between forward and backward, beside what is there between steps.
        scaled_gb: the measured bytes at the paper's batch, in GB; 0 without one.
        paper_gb: what the paper reports of it; 0 where it does not.
        limit: what the gradient may change by; 0 without codes.
        error: the most that it may change by, as was predicted of what was chosen.
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
    limit: float = 0.0
    error: float = 0.0
    kept: tuple[str, ...] = ()


def saved_in_codes(
    model: Frozen,
    rate: float = RATE,
    kinds: Sequence[str] = (),
    limits: Sequence[float] = LIMITS,
    batches: int = 0,
    said: Callable[[str], None] = lambda text: None,
    **smaller: Any,
) -> Iterator[SavedInCodes]:
    """Yield what forward saves with nothing frozen and at one rate, as it is and in codes.

    Args:
        model: one of `MODELS`.
        rate: the freezing rate.
        kinds: kinds of codes that are allowed; by default `KINDS`, or those that the model has.
        limits: what the gradient may change by.
        batches: samples on which errors are measured; by default as many as the model has.
        said: receives what is going on.
        smaller: changes the model's configuration.
    """
    made, batch = model.make(model.batch, **smaller)
    optimizer = torch.optim.AdamW(made.parameters(), lr=LEARNING_RATE)
    live, parameters = (made, optimizer, batch), dict(made.named_parameters())
    trace = trace_step(made, batch, optimizer=optimizer)
    kinds = kinds or model.kinds or KINDS
    forms = allowed(kinds, freezes=True)
    measured = _errors(model, forms, batches or model.measured, said, smaller)
    alike = _alike(trace, forms)
    for share in (0.0, rate):
        errors, found = _while_freezing(measured, trace, share) if share else measured, {0.0: PLAIN}
        for limit in limits:
            names = choices(trace, alike, errors, Lossy(kinds, limit), share)
            found[limit] = min(names, key=lambda name: _worst_bytes(trace, name, share), default=PLAIN)
        for limit, name in found.items():
            kept, error = described(trace, name, errors)
            ready = ReadyStep(rewritten(trace, name), live)
            row = partial(
                SavedInCodes,
                model.label,
                f"{len(ready.units)} of saving",
                _techniques(share, limit),
                share,
                paper_gb=_paper_gb(model, share, limit),
                limit=limit,
                error=error,
                kept=kept,
            )
            for mask, predicted, seen in _masks(ready, parameters, batch, share):
                scaled = round(seen * model.paper_batch / model.batch / 1e9, 2)
                yield row(mask=mask, predicted_bytes=predicted, measured_bytes=seen, scaled_gb=scaled)
            said(f"{model.label}: {_techniques(share, limit)} within {limit:.0%}")


def _techniques(rate: float, limit: float) -> str:
    return (BOTH if limit else FREEZING) if rate else (CODES if limit else NEITHER)


def _paper_gb(model: Frozen, rate: float, limit: float) -> float:
    return {NEITHER: model.paper_gb[0], BOTH: model.paper_gb[1]}.get(_techniques(rate, limit), 0.0)


def _masks(
    ready: ReadyStep, parameters: Mapping[str, torch.nn.Parameter], batch: Any, rate: float
) -> Iterator[tuple[str, int, int]]:
    """Yield masks with what they save, predicted and measured; where nothing is frozen there is but one."""
    count = len(ready.units)
    for name, choose in MASKS.items() if rate else (("all", worst),):
        mask = choose(ready.saved, count, active_count(count, rate))
        yield name, ready.saved.under(mask), ready.measured(mask, batch)
    if rate:
        predicted, measured = steps_of_ils(ready, parameters, batch, rate, ILS_STEPS)
        yield "ILS", round(fmean(predicted)), round(fmean(measured))


def _while_freezing(errors: Sequence[GradientError], trace: TraceTables, rate: float) -> list[GradientError]:
    units = units_of(trace, "saving")
    return errors_under_masks(errors, units, active_count(len(units), rate))


def _errors(
    model: Frozen, kinds: Sequence[str], batches: int, said: Callable[[str], None], smaller: Mapping[str, Any]
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

    return gradient_errors(trace, kinds, measured, progress=progress)


def _alike(trace: TraceTables, kinds: Sequence[str]) -> dict[str, Cost]:
    """Return costs with which bytes alone decide."""
    traces = [trace, *Classes(trace).everywhere(kinds)]
    return {c.signature: Cost(c.signature, "", 1e-6, 0, 0, 0, "roofline") for each in traces for c in each.calls}


def _worst_bytes(trace: TraceTables, variant: str, rate: float) -> int:
    """Return what the worst mask saves in a variant."""
    plan, border, _ = kept_plan(rewritten(trace, variant))
    saved, count = saved_bytes(plan, border), len(plan.units)
    return saved.under(worst(saved, count, active_count(count, rate)))
