"""What the planners find is what the referee of stored plans accepts: whatever moves, and whoever updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.plan import PlanSummary, plan_hash, tier_state
from stowage.stages.ir.trace import TraceTables
from stowage.stages.simulate.slots import slots_of
from stowage.stages.simulate.stored import check_stored
from stowage.stages.solve.offload.belady.belady import BeladyPlanner, belady_plans
from stowage.stages.solve.offload.belady.late_updates import late_updates
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.proposal import JudgedPlan
from tests.matrix import examples
from tests.solve.judged import hidden, judged
from tests.solve.offload.test_belady import QUICK, TINY, executions_of, offloader_of
from tests.solve.prepared import prepare_trace
from tests.solve.synthetic_steps import training_steps

NOTHING = PlanSummary("", "", "", "", 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0.0, 0, "", "", 0.0, 0.0, 0, 0)


def stated(trace: TraceTables, plan: JudgedPlan) -> PlanSummary:
    """What a plan states about itself."""
    outcome, configuration = plan.outcome, trace.meta.configuration_hash
    return replace(
        NOTHING,
        plan_hash=plan_hash(outcome.rows, configuration, outcome.peak_bytes),
        configuration_hash=configuration,
        device_budget_bytes=outcome.peak_bytes,
        device_peak_bytes=outcome.peak_bytes,
        baseline_bytes=outcome.baseline_bytes,
        lower_tier_bytes=outcome.lower_tier_bytes,
        disk_bytes=outcome.disk_bytes,
    )


def plans_of(trace: TraceTables, share: float, every: int, placement: str) -> Iterator[tuple[Offloader, JudgedPlan]]:
    """With some updates taken by the CPU, or with a disk and buffers of its own."""
    lower_tier = replace(TINY, cpu_update_bytes_per_s=1e3)
    if placement == "disk":
        lower_tier = replace(TINY, placement="disk", staging_bytes=100, padding_bytes=3)
    offloader = offloader_of(prepare_trace(trace), lower_tier)
    executions = executions_of(offloader)
    updates = late_updates(offloader, executions)[::every] if placement == "host" else []
    budget = BeladyPlanner(offloader, executions, frozenset(), updates).least_bytes + int(share * 100) + 1000
    for plan in judged(offloader.program, belady_plans(offloader, executions, budget, updates=updates)):
        yield offloader, plan
        yield offloader, hidden(offloader.program, plan, plan.peak_bytes)


@pytest.mark.parametrize("placement", ["host", "disk"])
@settings(max_examples=examples(60), **QUICK)
@given(trace=training_steps(), share=st.floats(0.0, 1.0), every=st.integers(1, 3))
def test_every_plan_that_moves_is_accepted(placement: str, trace: TraceTables, share: float, every: int) -> None:
    for offloader, plan in plans_of(trace, share, every, placement):
        slots = slots_of(trace, plan.steps, plan.state)
        assert tier_state(slots) == plan.state
        check_stored(trace, offloader.program.nodes, plan.outcome.rows, slots, stated(trace, plan))


@settings(max_examples=examples(30), **QUICK)
@given(trace=training_steps(), share=st.floats(0.0, 1.0), data=st.data())
def test_without_a_row_none_is(trace: TraceTables, share: float, data: st.DataObject) -> None:
    for offloader, plan in plans_of(trace, share, 1, "host"):
        rows = plan.outcome.rows
        gone = data.draw(st.integers(0, len(rows) - 1))
        left = [replace(row, row=i) for i, row in enumerate(rows[:gone] + rows[gone + 1 :])]
        slots = slots_of(trace, plan.steps, plan.state)
        summary = stated(trace, plan)
        named = replace(summary, plan_hash=plan_hash(left, summary.configuration_hash, summary.device_budget_bytes))
        with pytest.raises(IllegalPlanError):
            check_stored(trace, offloader.program.nodes, left, slots, named)
