"""Plans without leave to keep values in fewer bits, with it, and with freezing too: times, peaks, and the gradient."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.benchmarks.remat import models as remat_models
from stowage.flows.planning.costed import Costed
from stowage.flows.planning.freezing import Freezing
from stowage.flows.planning.job import Leave
from stowage.flows.planning.step import QUICK, Effort, Planned, Planning, StepToPlan, cost_step, plan_costed
from stowage.stages.freezing.policies import Random
from stowage.stages.ir.activations import activation_share, device_budget, fixed_bytes
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.lossy import MEASURED_BATCHES, GradientError, Lossy
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import rewritten
from stowage.stages.rewrite.lossy import allowed
from stowage.stages.runtime import Program
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.observe.measure import measure_program
from stowage.stages.sensitivity import ErrorStore, StepTensors, gradient_error, gradient_errors
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch

SHARES = (0.5, 0.3, 0.15)
"""Shares of the activation budget."""

RATE = 0.9
"""The share of units that the plan that may freeze freezes in each step."""

_LEARNING_RATE = 1e-8
"""So small that all plans have the same weights, however many steps came before."""

EXACT, LOSSY, FROZEN = "exact", "with leave", "freezing too"
"""The plans of one budget."""

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


MASKS = 1000
"""Choices of units under which the error of a plan that freezes is looked at."""


@dataclass(frozen=True)
class LossyRow:
    """One plan of one model within one budget.

    Attributes:
        model, share, budget_bytes: what was asked for; the share is of the activation budget.
        plan: `EXACT`, `LOSSY`, or `FROZEN`.
        feasible: whether there is a plan; without one the numbers are 0.
        predicted_time_s, time_s: of one step with an update by SGD; the median of some iterations. Where something is
            frozen it is the mean over masks that are drawn anew.
        predicted_peak_bytes, peak_bytes: highest device bytes; under the worst mask.
        predicted_error, error: of the gradient, see `Lossy.max_gradient_error`: of what is the change on `batch`, over
            the gradients of `others`; with freezing the largest of the units that train together in some steps.
        kept: what is kept in fewer bits.
        keep_all_time_s: predicted time with everything kept.
        same: it is the program of the exact plan, whose measured time it has.
        exact_time_s: the measured time of the exact plan within the same budget; 0 without one.
    """

    model: str
    share: float
    budget_bytes: int
    plan: str
    feasible: bool
    predicted_time_s: float = 0.0
    time_s: float = 0.0
    predicted_peak_bytes: int = 0
    peak_bytes: int = 0
    predicted_error: float = 0.0
    error: float = 0.0
    kept: tuple[str, ...] = ()
    keep_all_time_s: float = 0.0
    same: bool = False
    exact_time_s: float = 0.0


def compare_lossy(
    model: str,
    lossy: Lossy,
    stores: Path,
    *,
    shares: Iterable[float] = SHARES,
    quick: bool = True,
    iterations: int = 9,
    said: Callable[[str], None] = lambda text: None,
) -> Iterator[LossyRow]:
    """Yield for each share the exact plan, the one with leave, and the one that may freeze too; all run in turns.

    Where some share has no exact plan, the least budget that has one is taken besides.

    Args:
        model: one of `CASES`.
        lossy: the leave.
        stores: folder of the stores, see `cache_dir` of `fit`.
        shares: shares of the activation budget.
        quick: see `fit`.
        iterations: steps of each plan; the first is not timed.
        said: receives what is going on.
    """
    case = CASES[model]()
    live, before = ([StepTensors.of(case.model, b) for b in batches] for batches in ([case.batch], case.others))

    store, measured = ErrorStore(stores / "errors"), list[GradientError]()

    def errors(trace: TraceTables, leave: Lossy) -> list[GradientError]:
        if not measured:  # the step that freezes has the same classes, and more kinds of codes
            kinds = allowed(leave.kinds, freezes=True)
            key = store.key(trace, kinds, before)
            measured.extend(store.find(key) or gradient_errors(trace, kinds, before, progress=progress))
            store.add(key, measured)
        return measured

    def progress(done: int, total: int) -> None:
        if done % 100 == 0:
            said(f"{model}: {done} of {total} backwards to measure errors")

    how = Planning(stores=stores, effort=QUICK if quick else Effort(), progress=said)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=_LEARNING_RATE)
    step = StepToPlan(
        model=case.model, batch=case.batch, loss=case.loss, optimizer=optimizer, leave=Leave(lossy, errors)
    )
    costed = cost_step(step, how)
    freezing = replace(how, freeze=Freezing("saving", RATE, Random(RATE), measures=False), lossy=True)
    frozen = cost_step(step, freezing)
    ways = {EXACT: (costed, how), LOSSY: (costed, replace(how, lossy=True)), FROZEN: (frozen, freezing)}
    trace = costed.variants[0].trace
    whole = _planned(costed, 2 * costed.eager_peak_bytes, how)
    assert whole is not None
    stays, peak = fixed_bytes(trace), whole.summary.keep_all_peak_bytes
    budgets = [(share, device_budget(stays, peak, share)) for share in shares]
    given = len(budgets)
    for share, budget in budgets:
        plans = {name: _planned(own, budget, asked) for name, (own, asked) in ways.items()}
        exact = plans[EXACT]
        if exact is None and len(budgets) == given:
            least = _least(costed, how)
            budgets.append((activation_share(stays, peak, least), least))
        same = {n: p is not None and exact is not None and _program(p) == _program(exact) for n, p in plans.items()}
        runs = {
            name: _Run(case, optimizer, planned)
            for name, planned in plans.items()
            if planned is not None and (name == EXACT or not same[name])
        }
        for _ in range(iterations):
            for run in runs.values():
                run.once()
        for name, planned in plans.items():
            row = LossyRow(model, share, budget, name, planned is not None, same=name != EXACT and same[name])
            if planned is not None:
                s, run = planned.summary, runs[EXACT if same[name] else name]
                packed, masks = rewritten(trace, s.variant), trained_together(planned)
                error = 0.0 if s.exact else gradient_error(trace, packed, live, before, among=masks)
                row = replace(
                    row,
                    predicted_time_s=s.step_time_s,
                    time_s=run.time_s(),
                    predicted_peak_bytes=s.device_peak_bytes,
                    peak_bytes=run.peak_bytes(),
                    predicted_error=s.gradient_error,
                    error=error,
                    kept=s.lossy,
                    keep_all_time_s=whole.summary.step_time_s,
                    exact_time_s=runs[EXACT].time_s() if EXACT in runs else 0.0,
                )
            yield row


def trained_together(planned: Planned, masks: int = MASKS) -> list[list[str]]:
    """Return the parameters that train in each of some steps, drawn from a fixed seed; none where nothing is frozen."""
    units = list(planned.units)
    if not units:
        return []
    drawn, active = random.Random(1), planned.summary.active_units
    return [[name for unit in drawn.sample(units, active) for name in unit.parameters] for _ in range(masks)]


def _least(costed: Costed, how: Planning) -> int:
    """Return the smallest budget that there is a plan for, which a refusal of any smaller one names."""
    try:
        plan_costed(costed, 1, how)
    except Infeasible as refused:
        return refused.smallest_feasible_bytes
    return 1


def _planned(costed: Costed, budget_bytes: int, how: Planning) -> Planned | None:
    try:
        return plan_costed(costed, budget_bytes, how)
    except Infeasible:
        return None


def _program(planned: Planned) -> tuple[object, ...]:
    """Return what a plan runs: two plans with the same run alike, whatever their heads state of bounds."""
    return planned.summary.variant, planned.rows, planned.slots, planned.units


@dataclass
class _Run:
    """Runs one plan with updates; a plan that freezes trains other units in each step, drawn from a fixed seed."""

    case: Case
    optimizer: torch.optim.Optimizer
    planned: Planned
    times_s: list[float] = field(default_factory=list, init=False)
    _drawn: random.Random = field(default_factory=lambda: random.Random(0), init=False)

    def __post_init__(self) -> None:
        executor = SingleDevice(self.case.model, self.optimizer)
        self._program: Program = executor.bind(self.planned.executable(), {})

    def once(self) -> None:
        """Run one timed step."""
        if self.planned.units:
            names = [unit.name for unit in self.planned.units]
            self._program.active.choose(self._drawn.sample(names, self.planned.summary.active_units))
        began = time.perf_counter()
        self._program(self.case.batch)
        self.times_s.append(time.perf_counter() - began)

    def time_s(self) -> float:
        """Return the median time of a step but the first; the mean where masks differ, as the prediction is."""
        return statistics.fmean(self.times_s[1:]) if self.planned.units else statistics.median(self.times_s[1:])

    def peak_bytes(self) -> int:
        """Return the measured peak of one step, under the worst mask."""
        if self.planned.units:
            self._program.active.choose(self.planned.summary.worst_units)
        program, case = self._program, self.case
        return measure_program(program, case.model, self.optimizer, case.batch, program).peak_bytes
