"""Makes plans that need no search: nothing computed again, or the rows of a plan of the same step in another size."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow, Slot, tier_state
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.proposal import Decision, Proposal
from stowage.stages.solve.referee import Referee
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.select import updated_together
from stowage.stages.solve.summary import KeepingAll, Solved, solved


def keep_everything_at_once(trace: TraceTables, nodes: Sequence[ComputeNode], request: PlanRequest) -> Solved | None:
    """Run every node once, in their order, if the referee finds that this fits."""
    program = program_of(trace, nodes)
    if program.peak_bytes(_everything(nodes)) > request.device_budget_bytes:
        return None
    steps = program.steps(_everything(nodes))
    return _solved(
        trace, nodes, Proposal(method="keep_all", steps=steps, decision=Decision("keep_all")), program, request
    )


def same_rows(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    rows: Sequence[PlanRow],
    slots: Sequence[Slot],
    method: str,
    request: PlanRequest,
) -> Solved | None:
    """Take the rows of a plan of a step that has the same nodes in other sizes, if the referee accepts them."""
    program = program_of(trace, nodes)
    decision = Decision("the plan of another size")
    if slots:
        if request.lower_tier is None:
            return None
        state = tier_state(slots)
        proposal = Proposal(
            method=method,
            steps=[Step.of(row) for row in rows],
            decision=decision,
            tier=request.lower_tier,
            state=state,
            wanted_on_disk=state.on_disk,
        )
        return _solved(trace, nodes, proposal, program, request)
    if any(row.node >= 0 and row.action != "compute" for row in rows):
        proposal = Proposal(method=method, steps=[Step.of(row) for row in rows], decision=decision)
        found = _solved(trace, nodes, proposal, program, request)
        if found is not None:
            return found
    # Collectives in their places, where the plan starts them: they are hidden again as the budget allows.
    executed = [Execution(row.node, row.step) for row in rows if row.node >= 0]
    proposal = Proposal(method=method, steps=program.steps(executed), decision=decision)
    return _solved(trace, nodes, proposal, program, request)


def _solved(
    trace: TraceTables, nodes: Sequence[ComputeNode], proposal: Proposal, program: StepProgram, request: PlanRequest
) -> Solved | None:
    referee = Referee(program, request.device_budget_bytes)
    try:
        plan = referee.judge(proposal)
    except IllegalPlanError:
        return None
    if not referee.fits(plan):
        return None
    if any(n.collective for n in nodes):
        plan = referee.hide(plan)
    if plan.tier is None:  # the rows of a plan that offloads say already which updates are together
        plan = updated_together(trace, nodes, plan, referee, request.device_budget_bytes)
    keeping_all = KeepingAll(program.peak_bytes(_everything(nodes)), sum(n.time_s for n in nodes))
    return solved(trace, nodes, plan, keeping_all, plan.peak_bytes, request)


def _everything(nodes: Sequence[ComputeNode]) -> list[Execution]:
    return [Execution(n.node, "keep") for n in nodes]
