"""Plans batch sizes one by one, around an estimate of the best."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from stowage.flows.planning.job import Planning, StepToPlan
from stowage.flows.planning.step import block_options, cost_step, plan_step
from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.ir.errors import Infeasible, TraceError, size_text
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import variants_of
from stowage.stages.settings.sizes import resolve_budget
from stowage.stages.solve import FractionalBatch, fractional_batch, growth_of
from stowage.stages.structure.generators import forked_generators
from stowage.stages.trace import Recorded, record_step, with_updates
from stowage.stages.workload.autocast import without_autocast
from stowage.stages.workload.resize import resized

Say = Callable[[str], None]
Resize = Callable[[Any, int], Any]
"""Makes a batch with a number of samples from another batch."""

MORE = 2
"""Number of batches planned beyond the two neighbours of the estimate, while each is better than the last."""


@dataclass(frozen=True)
class BatchPlan:
    """One batch size, planned from trace to `step.py`.

    Attributes:
        batch_size: number of samples.
        plan: the plan's summary; None where the budget is too small.
        smallest_feasible_bytes: device bytes without which there is no plan for it.
    """

    batch_size: int
    plan: PlanSummary | None
    smallest_feasible_bytes: int

    @property
    def time_per_sample_s(self) -> float:
        """Return the time per sample that the referee predicts; infinite without a plan."""
        return self.plan.step_time_s / self.batch_size if self.plan else math.inf


@dataclass(frozen=True)
class BatchChoice:
    """The batch size to train with.

    Attributes:
        batch_size: batch size of the plan with the least time per sample.
        batch: a sample of that size, for `fit`.
        estimate: the optimum over fractional batch sizes, or None where no batch of one sample was found to fit.
        device_budget_bytes: the budget; a percentage is of plain PyTorch's peak on the given batch.
        planned: every batch size that was planned, ascending.
    """

    batch_size: int
    batch: Any
    estimate: FractionalBatch | None
    device_budget_bytes: int
    planned: tuple[BatchPlan, ...]

    @property
    def best(self) -> BatchPlan:
        """Return the plan of the chosen size."""
        return next(p for p in self.planned if p.batch_size == self.batch_size)

    def describe(self) -> str:
        """Return a line for each planned size, for people."""
        estimate = self.estimate
        found = "none" if estimate is None else f"{estimate.batch:.2f} ({estimate.formulation})"
        lines = [f"budget {size_text(self.device_budget_bytes)}, fractional optimum {found}"]
        for p in self.planned:
            what = f"needs {size_text(p.smallest_feasible_bytes)}"
            if p.plan is not None:
                what = (
                    f"{p.time_per_sample_s * 1e3:.3f} ms a sample, {p.plan.step_time_s:.4f} s a step, peak "
                    f"{size_text(p.plan.device_peak_bytes)}, {p.plan.method}"
                )
            lines.append(f"batch size {p.batch_size}: {what}{'  <- best' * (p.batch_size == self.batch_size)}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class BatchPlanner:
    """Plans one model with batches of any size.

    Attributes:
        step: the model with a batch; its peak is what a percentage is of.
        samples: how many samples that batch has.
        how: with which method and effort.
        resize: makes batches of other sizes.
        say: receives what the user should know.
    """

    step: StepToPlan
    samples: int
    how: Planning
    resize: Resize = resized
    say: Say = lambda text: None
    _recorded: dict[int, Recorded] = field(default_factory=dict)

    def choose(self, device_budget: str | int, largest: int) -> BatchChoice:
        """Estimate the best batch size, plan around the estimate, and return the best plan."""
        return with_true_kernels(lambda: self._choose(device_budget, largest), self._recorded.clear)

    def _choose(self, device_budget: str | int, largest: int) -> BatchChoice:
        with forked_generators():
            recorded = self._record(self.samples)
            with without_autocast():
                costed = cost_step(replace(self.step, recorded=recorded), self.how)
                budget = resolve_budget(device_budget, costed.eager_peak_bytes, "device_budget")
                options = block_options(costed.variants, self.how.stores, self.how.effort)
                larger = self._tables(2 * self.samples)
                estimates = [
                    fractional_batch(
                        v.trace,
                        v.nodes,
                        v.blocks,
                        options,
                        growth=growth_of(v.trace, larger[v.name]),
                        sample=self.samples,
                        largest=largest,
                        device_budget_bytes=budget,
                        method=self.how.method,
                        o_ilp_limits=self.how.effort.o_ilp,
                        lower_tier=self.how.lower_tier,
                    )
                    for v in costed.variants
                ]
            estimate = min((e for e in estimates if e), key=lambda e: e.time_per_sample_s, default=None)
            planned = plan_around(lambda size: self._plan(size, budget), estimate.batch if estimate else 1.0, largest)
        best = min(planned, key=lambda p: (p.time_per_sample_s, p.batch_size))
        return BatchChoice(best.batch_size, self._batch(best.batch_size), estimate, budget, planned)

    def _batch(self, size: int) -> Any:
        return self.step.batch if size == self.samples else self.resize(self.step.batch, size)

    def _record(self, size: int) -> Recorded:
        """Record forward and backward of a batch, under the autocast of the caller."""
        if size not in self._recorded:
            recorded = record_step(self.step.model, self._batch(size), loss=self.step.loss, layouts=self.step.layouts)
            if not self._recorded:
                for notice in recorded.notices:
                    self.say(notice)
            self._recorded[size] = recorded
        return self._recorded[size]

    def _tables(self, size: int) -> dict[str, TraceTables]:
        """Return trace and rewrites of another batch, unprofiled."""
        with self._tracing(size):
            recorded, step = self._record(size), self.step
            trace = with_updates(recorded, step.model, optimizer=step.optimizer, micro_batch=step.micro_batch)
        return variants_of(trace)

    @contextlib.contextmanager
    def _tracing(self, size: int) -> Iterator[None]:
        """Say which size cannot be traced, where that fails in the block."""
        try:
            yield
        except TraceError as error:
            raise TraceError(
                f"The model was traced with {self.samples} samples and cannot be with {size}: {error} If the batch has "
                "its samples elsewhere than along the first dimension, pass resize(batch, size)."
            ) from error

    def _plan(self, size: int, budget: int) -> BatchPlan:
        try:
            with self._tracing(size):
                recorded = self._record(size)
            with without_autocast():
                step = replace(self.step, batch=self._batch(size), recorded=recorded)
                planned = plan_step(step, budget, self.how)
        except Infeasible as infeasible:
            if size == 1:
                raise
            return BatchPlan(size, None, infeasible.smallest_feasible_bytes)
        return BatchPlan(size, planned.summary, planned.summary.smallest_feasible_bytes)


def plan_around(
    plan: Callable[[int], BatchPlan], around: float, largest: int, *, more: int = MORE
) -> tuple[BatchPlan, ...]:
    """Plan the two whole numbers next to `around`, then up to `more` beyond the better one while each is better.

    Where neither fits the budget, the largest that does is found by bisection.

    Args:
        plan: plans one size; one sample must fit.
        around: the estimate; at least 1.
        largest: the largest size to plan.
        more: how many sizes to plan beyond the two.

    Returns:
        All that was planned, by size.
    """
    low = max(1, min(math.floor(around), largest - 1))
    found = {size: plan(size) for size in sorted({low, min(low + 1, largest)})}
    if not any(p.plan for p in found.values()):
        fits, fails = 0, low
        while fails - fits > 1:
            middle = (fits + fails) // 2
            found[middle] = plan(middle)
            if found[middle].plan:
                fits = middle
            else:
                fails = middle
    for _ in range(more):
        best = min(found.values(), key=lambda p: (p.time_per_sample_s, p.batch_size))
        size = next((s for s in (best.batch_size + 1, best.batch_size - 1) if 1 <= s <= largest and s not in found), 0)
        if not size:
            break
        found[size] = plan(size)
        if found[size].time_per_sample_s >= best.time_per_sample_s:
            break
    return tuple(found[size] for size in sorted(found))
