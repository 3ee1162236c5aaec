"""Copies behind computing: what is moved, and that nothing else is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.machine import Link, TierState
from stowage.stages.ir.step import Step
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.simulate.plan import Outcome, replay_plan
from stowage.stages.solve.offload.hiding.shift import shift
from stowage.stages.solve.offload.hiding.timeline import FreeRunning, PlanTimeline
from stowage.stages.solve.offload.insertion import StepTransfers, insert_transfers
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.streaming import Streaming
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.proposal import Task
from stowage.stages.solve.request import PlanRequest
from tests.offload.with_lower_tier import LOWER_TIER, smallest_with_lower_tier
from tests.runtime.beside_eager import adamw, prepare
from tests.simulate.small_plans import node, storage
from tests.solve.judged import hidden, judged
from tests.solve.prepared import Prepared
from tests.zoo import ZOO

LINK = Link(100.0, 100.0, 200.0)


def rows_of(steps: Sequence[Step]) -> Counter[tuple[str, int, int]]:
    return Counter((s.kind, s.node, s.storage) for s in steps)


def offloader_of(prepared: Prepared) -> Offloader:
    program = program_of(prepared.trace, prepared.nodes)
    return Offloader(program, Chain(prepared.blocks, prepared.nodes, prepared.options), LOWER_TIER)


@pytest.mark.parametrize("slack", [1.0, 1.2, 2.0])
def test_the_same_rows_wait_less_within_the_budget(slack: float) -> None:
    prepared = prepare(ZOO["gpt2"], adamw)
    offloader = offloader_of(prepared)
    task = Task(offloader.program, offloader.chain, PlanRequest(1))
    found = judged(offloader.program, Streaming(offloader).propose(task))
    assert found
    for plan in found:
        budget = int(plan.outcome.peak_bytes * slack)
        shifted = hidden(offloader.program, plan, budget)
        assert shifted.hidden
        assert hidden(offloader.program, shifted, budget) is shifted
        assert shifted.peak_bytes <= budget
        assert shifted.time_s <= plan.time_s
        assert rows_of(shifted.steps) == rows_of(plan.steps)
        assert [s.node for s in shifted.steps if s.kind == "compute"] == [
            s.node for s in plan.steps if s.kind == "compute"
        ]
    assert smallest_with_lower_tier(prepared) > 0


Judge = Callable[[Sequence[Step]], Outcome]


def behind_a_large_copy() -> tuple[list[Step], Judge, list[int]]:
    """A weight of 1000 bytes goes down for 10 s; eight activations of 10 bytes go down behind it, each dropped a second
    after it was made, and come up long after."""
    count = 8
    weight, loss = count, count + 1
    storages = [storage(i, 10) for i in range(count)] + [storage(weight, 1000, "parameter", "weight"), storage(loss, 1)]
    nodes = [node(0, [weight], [0], mutates=(weight,))]
    nodes += [node(i, [i - 1], [i]) for i in range(1, count)]
    nodes.append(node(count, [count - 1], [loss], time_s=30.0))
    steps = [Step(0, -1, "F")]
    steps.append(Step(-1, weight, "F", "offload"))
    for i in range(1, count):
        steps += [Step(i, -1, "F"), Step(-1, i - 1, "F", "offload"), Step(-1, i - 1, "F", "wait"), Step(-1, i - 1, "F")]
    steps += [Step(count, -1, "F"), Step(-1, count - 1, "F"), Step(-1, weight, "F", "wait")]
    state = TierState(copied=frozenset({weight}))

    def judge(found: Sequence[Step]) -> Outcome:
        return replay_plan(storages, nodes, found, keep=frozenset({loss}), start=state, tier=ReplayedTier(LINK))

    return steps, judge, [s.nbytes for s in storages]


def test_small_copies_behind_a_large_one_are_all_waited_for_later() -> None:
    """Each wait alone, removed, hands its time to the next one: what is late is found in a timeline without waits."""
    steps, judge, sizes = behind_a_large_copy()
    before = judge(steps)
    assert before.wait_s > 3.0
    _, after = shift(steps, before, sizes, 10_000, judge)
    assert after.wait_s == pytest.approx(0.0, abs=1e-6)
    _, tight = shift(steps, before, sizes, before.peak_bytes, judge)
    assert tight.peak_bytes <= before.peak_bytes
    assert after.time_s <= tight.time_s <= before.time_s


def test_computing_that_never_waits_sees_everything_that_is_late() -> None:
    steps, judge, _ = behind_a_large_copy()
    outcome = judge(steps)
    of: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        if step.kind != "compute":
            of.setdefault(step.storage, []).append(i)
    first, *others = sorted(w.late_s for w in PlanTimeline(steps, outcome, of).waits())[::-1]
    assert first > 9 > 1 > sum(others), "the first takes nearly all the time"
    late = FreeRunning(steps, outcome, of).waits()
    assert len(late) == 7
    assert all(w.action == "offload" and w.late_s > 1 for w in late)


def test_moves_at_the_end_of_the_iteration() -> None:
    """An update by the CPU that starts when everything has run is on its way when the next iteration starts."""
    weight, state, gradient = 0, 1, 2
    nodes = [
        node(0, [weight], [gradient], phase="backward"),
        node(1, [gradient, weight, state], [], phase="update", mutates=(weight, state), once=True),
    ]
    down = StepTransfers(offload=(gradient,), reload=(weight,))
    end = StepTransfers(free=(gradient, weight), update=(weight,))
    lower_tier = frozenset({weight, state})
    moved = insert_transfers([Step(0, -1, "B0"), Step(-1, gradient, "B0")], [0, 0], [down, end], nodes, lower_tier)
    assert moved.state.updating == {weight}
    storages = [
        storage(weight, 100, "parameter", "w"),
        storage(state, 200, "state", "w::m"),
        storage(gradient, 100, name="g"),
    ]
    outcome = replay_plan(
        storages, nodes, moved.steps, start=moved.state, tier=ReplayedTier(LINK, cpu_update_s={1: 3.0})
    )
    assert outcome.peak_bytes == 200, "the state is never on the device"
    # An iteration: the update before ends after 3 s, the weight takes 1 s up, computing 1 s, the gradient 1 s down.
    assert outcome.time_s == pytest.approx(6.0)


def test_what_never_changes_has_a_copy_in_the_lower_tier_from_the_start() -> None:
    """A frozen weight that is on the device between iterations may leave within one without going down first."""
    weight, first, second = 0, 1, 2
    storages = [storage(weight, 100, "parameter", "w"), storage(first, 1), storage(second, 1)]
    nodes = [node(0, [weight], [first]), node(1, [first, weight], [second])]
    rows = [Step(0, -1, "F0"), Step(1, -1, "F1"), Step(-1, first, "F1")]
    moved = insert_transfers(
        rows,
        [0, 2, 2],
        [StepTransfers(), StepTransfers(free=(weight,)), StepTransfers(reload=(weight,))],
        nodes,
        frozenset(),
    )
    assert moved.state.copied == {weight}
    kinds = [s.kind for s in moved.steps if s.storage == weight]
    assert kinds == ["free", "reload", "wait"]
    outcome = replay_plan(
        storages, nodes, moved.steps, keep=frozenset({second}), start=moved.state, tier=ReplayedTier(LINK)
    )
    assert outcome.offload_bytes == 0
    changed = [nodes[0], replace(nodes[1], phase="update", mutates=(weight,), once=True)]
    with pytest.raises(IllegalPlanError):
        replay_plan(
            storages, changed, moved.steps, keep=frozenset({second}), start=moved.state, tier=ReplayedTier(LINK)
        )


def test_a_reload_that_is_needed_later_lets_another_pass() -> None:
    """The small weight has no room to come up earlier, and is behind a large one in the queue that is not urgent."""
    small, large, early, middle, late, loss = range(6)
    storages = [
        storage(small, 10, "parameter", "small"),
        storage(large, 1000, "parameter", "large"),
        storage(early, 10),
        storage(middle, 1),
        storage(late, 1),
        storage(loss, 1),
    ]
    nodes = [
        node(0, [], [early]),
        node(1, [early], [middle]),
        node(2, [small, middle], [late]),
        node(3, [late], [], time_s=20.0),
        node(4, [large, late], [loss]),
    ]
    steps = [
        Step(-1, large, "F", "reload"),
        Step(0, -1, "F"),
        Step(1, -1, "F"),
        Step(-1, early, "F"),
        Step(-1, small, "F", "reload"),
        Step(-1, small, "F", "wait"),
        Step(2, -1, "F"),
        Step(-1, middle, "F"),
        Step(3, -1, "F"),
        Step(-1, large, "F", "wait"),
        Step(4, -1, "F"),
        Step(-1, late, "F"),
        Step(-1, small, "F"),
        Step(-1, large, "F"),
    ]
    state = TierState(offloaded=frozenset({small, large}), copied=frozenset({small, large}))

    def judge(found: Sequence[Step]) -> Outcome:
        return replay_plan(storages, nodes, found, keep=frozenset({loss}), start=state, tier=ReplayedTier(LINK))

    before = judge(steps)
    assert before.wait_s == pytest.approx(8.1)
    found, after = shift(steps, before, [s.nbytes for s in storages], before.peak_bytes, judge)
    assert after.wait_s == pytest.approx(0.0, abs=1e-6), (
        "it comes up early, for the large one is not in the way any more"
    )
    assert after.peak_bytes <= before.peak_bytes
    assert rows_of(found) == rows_of(steps)
