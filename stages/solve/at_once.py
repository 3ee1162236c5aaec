"""Plans that need no search: nothing computed again, and the rows of a plan of the same step in another size."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE
from stowage.stages.ir.plan import PlanRow, Slot, tier_state
from stowage.stages.ir.trace import TraceTables
from stowage.stages.simulate.plan import Outcome, Step
from stowage.stages.simulate.slots import slots_of
from stowage.stages.simulate.together import updates_together
from stowage.stages.solve.in_memory import Candidate
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Chain, Execution
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.select import Solved, program_of, summary_of


def keep_everything_at_once(trace: TraceTables, nodes: Sequence[ComputeNode], request: PlanRequest) -> Solved | None:
    """Every node once, in their order, if the referee finds that this fits."""
    program = program_of(trace, nodes)
    everything = _everything(trace, nodes)
    if everything.peak_bytes > request.device_budget_bytes:
        return None
    outcome = updates_together(
        trace, nodes, program.replay(everything.executions), request.device_budget_bytes, program.judge
    )
    return _solved(trace, nodes, outcome, [], "keep_all", everything, request)


def same_rows(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    rows: Sequence[PlanRow],
    slots: Sequence[Slot],
    method: str,
    request: PlanRequest,
) -> Solved | None:
    """The rows of a plan of a step that has the same nodes and storages in other sizes, if the referee accepts them."""
    steps = [_step(row) for row in rows]
    state = tier_state(slots) if slots else EVERYTHING_ON_DEVICE
    try:
        if slots:
            if request.below is None:
                return None
            offloader = Offloader(program_of(trace, nodes), Chain([], nodes, []), request.below)
            plan = offloader.judged(method, steps, state, state.on_disk)
            outcome, found = plan.outcome, slots_of(trace, plan.steps, plan.state)
        else:
            program = program_of(trace, nodes)
            executed = [Execution(s.node, s.label) for s in steps if s.kind == "compute"]
            outcome = updates_together(
                trace, nodes, program.replay(executed), request.device_budget_bytes, program.judge
            )
            found = []
    except IllegalPlanError:
        return None
    if outcome.peak_bytes > request.device_budget_bytes:
        return None
    return _solved(trace, nodes, outcome, found, method, _everything(trace, nodes), request)


def _everything(trace: TraceTables, nodes: Sequence[ComputeNode]) -> Candidate:
    executions = [Execution(n.node, "keep") for n in nodes]
    peak_bytes = program_of(trace, nodes).peak_bytes(executions)
    return Candidate("keep_all", executions, sum(n.time_s for n in nodes), peak_bytes)


def _step(row: PlanRow) -> Step:
    if row.action == "compute":
        return Step(row.node, -1, row.step)
    return Step(row.node, row.storage, row.step, row.action)


def _solved(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    outcome: Outcome,
    slots: list[Slot],
    method: str,
    everything: Candidate,
    request: PlanRequest,
) -> Solved:
    summary = summary_of(trace, nodes, [], outcome, method, everything, outcome.peak_bytes, request)
    return Solved(outcome.rows, summary, slots)
