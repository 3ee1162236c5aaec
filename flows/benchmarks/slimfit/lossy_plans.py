"""Plans with and without leave to keep values in fewer bits: their times and peaks, and what the gradient pays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.benchmarks.remat import models as remat_models
from stowage.flows.planning.costed import Costed
from stowage.flows.planning.job import Leave
from stowage.flows.planning.step import QUICK, Effort, Planned, Planning, StepToPlan, cost_step, plan_costed
from stowage.stages.ir.activations import device_budget, fixed_bytes
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.lossy import MEASURED_BATCHES, GradientError, Lossy
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import rewritten
from stowage.stages.runtime import Program
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.observe.measure import measure_program
from stowage.stages.sensitivity import StepTensors, gradient_error, gradient_errors
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch

SHARES = (0.5, 0.3, 0.15)
"""Shares of the activation budget."""

_TRANSFORMER = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}


@dataclass(frozen=True)
class Case:
    """A model with its batch.

    Attributes:
        model: the model.
        batch: what steps are timed, and the errors of their gradients measured, with.
        others: the batches on which errors are measured before planning.
        loss: see `fit`.
    """

    model: nn.Module
    batch: Any
    others: Sequence[Any]
    loss: Callable[[Any, Any], torch.Tensor] | None = None


def _batches(model: nn.Module, length: int) -> tuple[Any, list[Any]]:
    batch, *others = (sample_batch(model, 8, length, seed) for seed in range(1, 2 + MEASURED_BATCHES))
    return batch, others


def _gpt2() -> Case:
    shape = {"n_layer": 6, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 1024}
    model = build_model("gpt2", shape, seed=0)
    return Case(model, *_batches(model, 128))


def _bert() -> Case:
    model = build_model("bert", {**_TRANSFORMER, "max_position_embeddings": 128, "vocab_size": 1024}, seed=0)
    return Case(model, *_batches(model, 128))


def _vit() -> Case:
    model = build_model("vit", {**_TRANSFORMER, "image_size": 96, "patch_size": 8, "num_labels": 10}, seed=0)
    return Case(model, *_batches(model, 96))


def _unet() -> Case:
    case = remat_models.build("unet", "small")
    return Case(case.model, case.batch, [case.batch], case.loss)


CASES: dict[str, Callable[[], Case]] = {"gpt2": _gpt2, "bert": _bert, "vit": _vit, "unet": _unet}
"""Models by name."""


@dataclass(frozen=True)
class LossyRow:
    """One plan of one model within one budget.

    Attributes:
        model, share, budget_bytes: what was asked for; the share is of the activation budget.
        lossy: whether there was leave.
        feasible: whether there is a plan; without one the numbers are 0.
        predicted_time_s, time_s: of one step, without an update; the median of some iterations.
        predicted_peak_bytes, peak_bytes: highest device bytes.
        predicted_error, error: of the gradient, see `Lossy.max_gradient_error`: of what is the change on `batch`, over
            the gradients of `others`.
        kept: what is kept in fewer bits.
        keep_all_time_s: predicted time with everything kept.
    """

    model: str
    share: float
    budget_bytes: int
    lossy: bool
    feasible: bool
    predicted_time_s: float = 0.0
    time_s: float = 0.0
    predicted_peak_bytes: int = 0
    peak_bytes: int = 0
    predicted_error: float = 0.0
    error: float = 0.0
    kept: tuple[str, ...] = ()
    keep_all_time_s: float = 0.0


def compare_lossy(
    name: str,
    lossy: Lossy,
    stores: Path,
    *,
    shares: Iterable[float] = SHARES,
    quick: bool = True,
    iterations: int = 9,
    said: Callable[[str], None] = lambda text: None,
) -> Iterator[LossyRow]:
    """Yield for each share the exact plan and the one with leave, both run in turns.

    Args:
        name: one of `CASES`.
        lossy: the leave.
        stores: folder of the stores, see `cache_dir` of `fit`.
        shares: shares of the activation budget.
        quick: see `fit`.
        iterations: steps of each plan; the first is not timed.
        said: receives each stage's name.
    """
    case = CASES[name]()
    live, before = ([StepTensors.of(case.model, b) for b in batches] for batches in ([case.batch], case.others))

    def errors(trace: TraceTables, leave: Lossy) -> list[GradientError]:
        return gradient_errors(trace, leave.kinds, before)

    how = Planning(stores=stores, effort=QUICK if quick else Effort(), progress=said)
    step = StepToPlan(model=case.model, batch=case.batch, loss=case.loss, leave=Leave(lossy, errors))
    costed = cost_step(step, how)
    trace = costed.variants[0].trace
    whole = _planned(costed, 2 * costed.eager_peak_bytes, how)
    assert whole is not None
    for share in shares:
        budget = device_budget(fixed_bytes(trace), whole.summary.keep_all_peak_bytes, share)
        plans = {leave: _planned(costed, budget, replace(how, lossy=leave)) for leave in (False, True)}
        runs = {leave: _Run(case, planned) for leave, planned in plans.items() if planned is not None}
        for _ in range(iterations):
            for run in runs.values():
                run.once()
        for leave, planned in plans.items():
            row = LossyRow(name, share, budget, leave, planned is not None)
            if planned is not None:
                s, run = planned.summary, runs[leave]
                error = 0.0 if s.exact else gradient_error(trace, rewritten(trace, s.variant), live, before)
                row = replace(
                    row,
                    predicted_time_s=s.step_time_s,
                    time_s=statistics.median(run.times_s[1:]),
                    predicted_peak_bytes=s.device_peak_bytes,
                    peak_bytes=run.peak_bytes(),
                    predicted_error=s.gradient_error,
                    error=error,
                    kept=s.lossy,
                    keep_all_time_s=whole.summary.step_time_s,
                )
            yield row


def _planned(costed: Costed, budget_bytes: int, how: Planning) -> Planned | None:
    try:
        return plan_costed(costed, budget_bytes, how)
    except Infeasible:
        return None


class _Run:
    """Runs one plan; gradients stay in `.grad`, and are dropped before each step."""

    def __init__(self, case: Case, planned: Planned) -> None:
        self._case = case
        self._program: Program = SingleDevice(case.model, None).bind(planned.executable(), {})
        self.times_s: list[float] = []

    def once(self) -> None:
        """Run one timed step."""
        self._case.model.zero_grad()
        began = time.perf_counter()
        self._program(self._case.batch)
        self.times_s.append(time.perf_counter() - began)

    def peak_bytes(self) -> int:
        """Return the measured peak of one step."""
        self._case.model.zero_grad()
        case = self._case
        return measure_program(self._program, case.model, None, case.batch, self._program).peak_bytes
