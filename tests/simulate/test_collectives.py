"""The referee on collectives that run beside computing."""

from __future__ import annotations

import pytest

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.step import Step
from stowage.stages.simulate.plan import Outcome, replay_plan
from tests.simulate.sharded_steps import Layer, in_order, sharded_step

PROGRAM = sharded_step([Layer(weight=100, activation=10, compute_s=3.0, collective_s=2.0)])
NAMES = {s.name: s.storage for s in PROGRAM.storages}
NODES = {n.name: n.node for n in PROGRAM.nodes}


def start(name: str) -> Step:
    number = NODES[name]
    return Step(number, PROGRAM.nodes[number].creates[0], "", "gather" if "gather" in name else "scatter")


def run(name: str) -> Step:
    return Step(NODES[name], -1, "")


def wait(name: str) -> Step:
    return Step(-1, NAMES[name], "", "wait")


def free(name: str) -> Step:
    return Step(-1, NAMES[name], "")


LEGAL = [
    start("gather 0"),
    wait("w0.whole"),
    run("layer 0"),
    run("loss"),
    run("loss backward"),
    free("a0"),
    run("layer 0 backward"),
    free("w0.whole"),
    free("gradient of loss"),
    free("gradient of a0"),
    start("scatter 0"),
    wait("g0.shard"),
    free("g0"),
    run("update 0"),
    free("g0.shard"),
]


def judge(steps: list[Step]) -> Outcome:
    return replay_plan(PROGRAM.storages, PROGRAM.nodes, steps, keep=PROGRAM.keep)


def swapped(first: int, second: int) -> list[Step]:
    steps = list(LEGAL)
    steps[first], steps[second] = steps[second], steps[first]
    return steps


def without(number: int) -> list[Step]:
    return LEGAL[:number] + LEGAL[number + 1 :]


def test_legal_by_hand() -> None:
    outcome = judge(LEGAL)
    assert outcome.time_s == pytest.approx(2.0 + 3.0 + 1.0 + 1.0 + 6.0 + 2.0 + 0.1)
    assert outcome.wait_s == pytest.approx(4.0)  # nothing runs beside them
    # 50 + 4 + loss 4, the gradient 100, the scatter's buffer 100 and its result 50
    assert outcome.peak_bytes == 50 + 4 + 4 + 100 + 100 + 50


def test_a_collective_runs_beside_computing() -> None:
    two = sharded_step([Layer(100, 10, 3.0, 2.0), Layer(100, 10, 3.0, 2.0)])
    steps = two.steps(in_order(two))
    serial = replay_plan(two.storages, two.nodes, steps, keep=two.keep)
    number = next(n for n in two.nodes if n.name == "gather 1")
    at = next(i for i, s in enumerate(steps) if s.node == number.node)
    before = next(i for i, s in enumerate(steps) if two.nodes[s.node].name == "layer 0")
    early = Step(number.node, number.creates[0], "", "gather")
    late = Step(-1, number.creates[0], "", "wait")
    moved = [*steps[:before], early, *steps[before:at], late, *steps[at + 1 :]]
    outcome = replay_plan(two.storages, two.nodes, moved, keep=two.keep)
    assert outcome.time_s == pytest.approx(serial.time_s - 2.0)
    assert [r.action for r in outcome.rows if r.node == number.node] == ["gather"]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (swapped(1, 2), "not in memory"),  # read before it is here
        (swapped(12, 11), "a collective is still using it"),  # the gradient is freed while it is scattered
        (swapped(13, 11), "not in memory"),  # updated before the mean is here
        (without(1), "not in memory"),
        ([*LEGAL, wait("w0.whole")], "nothing is under way for it"),
        ([LEGAL[0], free("w0.whole"), *LEGAL[1:]], "a collective is still using it"),
        ([LEGAL[0], LEGAL[0], *LEGAL[1:]], "still in memory"),
        ([LEGAL[0], Step(-1, NAMES["w0"], "", "offload"), *LEGAL[1:]], "while it is copied"),
    ],
)
def test_refused(steps: list[Step], said: str) -> None:
    with pytest.raises(IllegalPlanError, match=said):
        judge(steps)


def test_what_is_under_way_at_the_end() -> None:
    again = [*LEGAL, start("gather 0")]
    with pytest.raises(IllegalPlanError, match="runs again after something it reads was updated"):
        judge(again)


def test_a_shard_is_not_updated_while_it_is_gathered() -> None:
    steps = list(LEGAL)
    steps.insert(10, start("gather 0"))  # a second gather, still under way at the update
    with pytest.raises(IllegalPlanError, match="while it is copied"):
        judge(steps)
