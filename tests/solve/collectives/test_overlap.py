"""Collectives beside computing: never slower, never above the budget, the same work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.step import Step
from stowage.stages.simulate.plan import Outcome, replay_plan
from stowage.stages.solve.collectives.overlap import MOVES, _Overlap, _rows_of, overlap
from stowage.stages.solve.collectives.policies import gathered_again
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.program import StepProgram
from tests.simulate.sharded_steps import Layer, in_order, sharded_step

LAYERS = st.lists(
    st.builds(
        Layer,
        weight=st.integers(1, 60).map(lambda n: 2 * n),
        activation=st.integers(1, 50),
        compute_s=st.floats(0.1, 5.0),
        collective_s=st.floats(0.1, 5.0),
    ),
    min_size=1,
    max_size=6,
)


def judge_of(program: StepProgram) -> object:
    def judge(steps: Sequence[Step]) -> Outcome | None:
        try:
            return replay_plan(program.storages, program.nodes, steps, keep=program.keep)
        except IllegalPlanError:
            return None

    return judge


def overlapped(program: StepProgram, executions: list[Execution], spare: int) -> tuple[Outcome, Outcome, int]:
    steps = program.steps(executions)
    serial = replay_plan(program.storages, program.nodes, steps, keep=program.keep)
    budget = serial.peak_bytes + spare
    moved, outcome = overlap(
        steps,
        serial,
        program.nodes,
        program.nbytes,
        budget,
        judge_of(program),  # type: ignore[arg-type]
    )
    assert outcome.rows == replay_plan(program.storages, program.nodes, moved, keep=program.keep).rows
    return serial, outcome, budget


@given(LAYERS)
def test_the_row_that_a_gather_cannot_pass_is_the_one_found_by_walking(layers: list[Layer]) -> None:
    program = sharded_step(layers)
    steps = program.steps(gathered_again(in_order(program), program.nodes))
    outcome = replay_plan(program.storages, program.nodes, steps, keep=program.keep)
    rows = _rows_of(steps, outcome, program.nodes)
    moving = _Overlap(steps, outcome, program.nodes, program.nbytes, 10**6, 1.0, rows, MOVES[0])

    def changes(k: int, gather: ComputeNode) -> bool:
        step = steps[k]
        if step.kind != "compute":
            return step.storage in {*gather.creates, *gather.reads}
        other = program.nodes[step.node]
        uses = {*other.reads, *other.mutates, *other.creates}
        return bool(uses.intersection(gather.creates) or {*other.mutates}.intersection(gather.reads))

    for i, step in enumerate(steps):
        if step.kind == "compute" and program.nodes[step.node].collective:
            gather = program.nodes[step.node]
            walked = max((k for k in range(i) if changes(k, gather)), default=-1)
            assert moving._latest_change(i, gather, {}) == walked


@given(LAYERS, st.integers(0, 400), st.booleans())
def test_never_slower_and_within_the_budget(layers: list[Layer], spare: int, reshard: bool) -> None:
    program = sharded_step(layers)
    executions = in_order(program)
    if reshard:
        executions = gathered_again(executions, program.nodes)
    serial, outcome, budget = overlapped(program, executions, spare)
    assert outcome.time_s <= serial.time_s * (1 + 1e-9)
    assert outcome.peak_bytes <= budget
    assert Counter(r.node for r in outcome.rows if r.node >= 0) == Counter(e.node for e in executions)


def test_with_room_everything_is_hidden_that_can_be() -> None:
    """Eight equal layers whose collectives take less time than computing: all but the first gather and last scatter."""
    program = sharded_step([Layer(100, 10, 3.0, 1.0)] * 8)
    serial, outcome, _ = overlapped(program, in_order(program), 10_000)
    computing = sum(n.time_s for n in program.nodes if not n.collective)
    assert serial.time_s > computing + 15.9
    assert outcome.time_s <= computing + 2.0 + 1e-6


def test_without_room_a_plan_stays_legal() -> None:
    program = sharded_step([Layer(100, 10, 3.0, 1.0)] * 4)
    serial, outcome, budget = overlapped(program, in_order(program), 0)
    assert outcome.peak_bytes <= budget == serial.peak_bytes


def test_weights_are_gathered_again_for_backward() -> None:
    program = sharded_step([Layer(100, 10, 3.0, 1.0)] * 4)
    again = gathered_again(in_order(program), program.nodes)
    gathers = [e.node for e in again if program.nodes[e.node].name.startswith("gather")]
    assert Counter(gathers) == Counter({n.node: 2 for n in program.nodes if n.name.startswith("gather")})
    assert program.peak_bytes(again) < program.peak_bytes(in_order(program))
    kept = frozenset(gathers[:1])
    assert gathers[0] not in Counter(
        e.node for e in gathered_again(in_order(program), program.nodes, kept)[len(program.nodes) // 2 :]
    )
