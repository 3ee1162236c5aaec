"""Updates that are put off: as many in one call as the budget has room for, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.codegen import emit_step
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.step import Step
from stowage.stages.ir.updates import UPDATE
from stowage.stages.simulate.plan import Outcome, replay_plan
from stowage.stages.simulate.together import put_off, updates_together
from stowage.stages.trace import MicroBatch
from tests.matrix import THOROUGH, examples
from tests.offload.test_offloaded_training import OPTIMIZERS
from tests.runtime.beside_eager import prepare
from tests.simulate.small_plans import node, storage
from tests.solve.prepared import PLENTY, Prepared
from tests.zoo import ZOO

Kind = tuple[str, str, float | None]
QUICK: list[Kind] = [
    ("gpt2_frozen", "adamw", None),
    ("tied", "adamw", 0.1),
    ("lstm", "momentum", 0.1),
    ("resnet", "momentum", None),
    ("batchnorm", "adamw", 0.1),
    ("y_sum", "adamw", None),
    ("in_place", "momentum", 0.1),
]
REST: list[Kind] = [(n, o, m) for n in ZOO for o in ("adamw", "momentum") for m in (None, 0.1)]


def kinds() -> st.SearchStrategy[Kind]:
    """Model, optimizer and the limit of clipping; the whole zoo in a thorough run."""
    return st.sampled_from(REST if settings().max_examples >= THOROUGH else QUICK)


@cache
def on_a_card(name: str, optimizer: str, max_grad_norm: float | None) -> tuple[Prepared, Prepared]:
    """As it was traced here, and said to be of a card."""
    here = prepare(ZOO[name], OPTIMIZERS[optimizer], MicroBatch(max_grad_norm=max_grad_norm))
    return here, replace(here, trace=replace(here.trace, meta=replace(here.trace.meta, device="cuda")))


@cache
def range_of(name: str, optimizer: str, max_grad_norm: float | None) -> tuple[int, int]:
    """The smallest feasible budget, and one with room for every gradient and workspace at once."""
    here, card = on_a_card(name, optimizer, max_grad_norm)
    summary = card.solve().summary
    gradients = sum(here.trace.storages[s].nbytes for s in gradients_of(here))
    workspaces = sum(n.workspace_bytes for n in here.nodes)
    return summary.smallest_feasible_bytes, summary.keep_all_peak_bytes + gradients + workspaces


def gradients_of(prepared: Prepared) -> set[int]:
    values = prepared.trace.values
    return {values[g.gradient_value].storage for g in prepared.trace.gradients if g.gradient_value >= 0}


def update_nodes(prepared: Prepared) -> set[int]:
    calls = prepared.trace.calls
    return {n.node for n in prepared.nodes if [calls[c].target for c in n.calls] == [UPDATE]}


def without_updates(rows: Sequence[PlanRow], updates: set[int]) -> list[tuple[str, int, int, str]]:
    """What is not an update, nor a row that frees what updates use up, in order."""
    return [
        (row.action, row.node, row.storage, row.step)
        for row in rows
        if not (row.action == "compute" and row.node in updates) and row.action != "free"
    ]


def calls_of(rows: Sequence[PlanRow], updates: set[int]) -> list[int]:
    """How many updates each call of the optimizer has."""
    runs = groupby(rows, lambda row: row.action == "compute" and row.node in updates)
    return [len(list(found)) for is_update, found in runs if is_update]


@settings(max_examples=examples(100))
@given(st.deferred(kinds), st.floats(0, 1))
def test_plans_of_a_card(kind: Kind, part: float) -> None:
    """Within the budget, every update once, what is not an update in the order of the plan that it was made of."""
    here, card = on_a_card(*kind)
    low, high = range_of(*kind)
    budget = int(low + part * (high - low))
    plain, solved = here.solve(budget), card.solve(budget)
    outcome = replayed(card, [Step(r.node, r.storage, r.step) for r in solved.rows], budget)
    assert outcome.rows == solved.rows
    assert outcome.peak_bytes == solved.summary.device_peak_bytes <= budget
    updates = update_nodes(card)
    done = Counter(row.node for row in solved.rows if row.action == "compute")
    assert all(done[n] == 1 for n in updates)
    assert sum(calls_of(solved.rows, updates)) == len(updates)
    assert len(calls_of(solved.rows, updates)) <= len(calls_of(plain.rows, updates)), "in no more calls than without"
    if solved.summary.method == plain.summary.method:
        assert without_updates(solved.rows, updates) == without_updates(plain.rows, updates)
        assert solved.summary.step_time_s <= 1.001 * plain.summary.step_time_s
        changed = Counter((r.action, r.node, r.storage) for r in solved.rows)
        assert changed == Counter((r.action, r.node, r.storage) for r in plain.rows)
    source = emit_step(here.trace, here.nodes, solved.rows, solved.summary)
    several = [n for n in calls_of(solved.rows, updates) if n > 1]
    assert source.count("run.update_together(") == len(several)
    assert source.count("run.update(") == len(updates) - sum(several)
    assert "update_together" not in emit_step(here.trace, here.nodes, plain.rows, plain.summary)


@settings(max_examples=examples(60))
@given(st.deferred(kinds), st.lists(st.floats(0, 1), min_size=2, max_size=4), st.floats(0, 1))
def test_less_room_more_calls(kind: Kind, parts: list[float], plan: float) -> None:
    """Of one plan: the budgets of putting off from the plan's own peak to plenty."""
    here, _ = on_a_card(*kind)
    low, high = range_of(*kind)
    solved = here.solve(int(low + plan * (high - low)))
    peak = solved.summary.device_peak_bytes
    updates, found = update_nodes(here), []
    for budget in [*sorted(int(peak + part * (high - peak)) for part in parts), PLENTY]:
        rows = replayed(here, put_off(here.trace, here.nodes, solved.rows, budget), budget).rows
        found.append(len(calls_of(rows, updates)))
        assert without_updates(rows, updates) == without_updates(solved.rows, updates)
    assert found == sorted(found, reverse=True)
    assert found[-1] == 1
    before = len(calls_of(solved.rows, updates))
    assert found[0] <= before


def replayed(prepared: Prepared, steps: Sequence[Step], budget: int | None = None) -> Outcome:
    trace = prepared.trace
    return replay_plan(trace.storages, prepared.nodes, steps, keep=prepared.keep(), budget_bytes=budget)


@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm"])
def test_a_cpu_keeps_its_plan(name: str) -> None:
    here, card = on_a_card(name, "adamw", None)
    solved = here.solve()
    outcome = replayed(here, [Step(r.node, r.storage, r.step) for r in solved.rows])
    asked: list[Sequence[Step]] = []

    def judge(steps: Sequence[Step]) -> Outcome:
        asked.append(steps)
        return replayed(here, steps)

    assert updates_together(here.trace, here.nodes, outcome, PLENTY, judge) is outcome
    assert asked == []
    found = updates_together(card.trace, card.nodes, outcome, PLENTY, judge)
    assert len(asked) == 1
    assert calls_of(found.rows, update_nodes(here)) == [len(update_nodes(here))]


def test_what_the_referee_finds_worse_is_not_taken() -> None:
    """Above the budget, slower, or illegal."""
    here, card = on_a_card("tied", "adamw", None)
    solved = here.solve()
    outcome = replayed(here, [Step(r.node, r.storage, r.step) for r in solved.rows])

    def refuse(steps: Sequence[Step]) -> Outcome:
        raise IllegalPlanError("never")

    def late(steps: Sequence[Step]) -> Outcome:
        found = replayed(here, steps)
        return replace(found, time_s=1.01 * outcome.time_s)

    def large(steps: Sequence[Step]) -> Outcome:
        return replace(replayed(here, steps), peak_bytes=PLENTY + 1)

    for judge in (refuse, late, large):
        assert updates_together(card.trace, card.nodes, outcome, PLENTY, judge) is outcome
    found = updates_together(card.trace, card.nodes, outcome, PLENTY, lambda steps: replayed(here, steps))
    assert found is not outcome


LOSS, ONE, TWO, G1, G2 = range(5)
STORAGES = [
    storage(LOSS, 1),
    storage(ONE, 100, "parameter"),
    storage(TWO, 100, "parameter"),
    storage(G1, 10),
    storage(G2, 20),
]
NODES: list[ComputeNode] = [
    node(0, [ONE, TWO], [LOSS]),
    node(1, [LOSS], [G1], phase="backward"),
    node(2, [LOSS], [G2], phase="backward"),
    node(3, [G1, ONE], [], phase="update", mutates=(ONE,), once=True, workspace_bytes=1000),
    node(4, [G2, TWO], [], phase="update", mutates=(TWO,), once=True, workspace_bytes=3000),
]
BASE = 200 + 1


@pytest.mark.parametrize(
    ("order", "peak"),
    [
        ([1, 3, -G1, 2, 4, -G2], BASE + 20 + 3000),
        ([1, 2, 3, -G1, 4, -G2], BASE + 20 + 3000),
        ([1, 2, 3, 4, -G1, -G2], BASE + 30 + 4000),
        ([1, 2, 4, 3, -G1, -G2], BASE + 30 + 4000),
        ([1, 2, 4, -G2, 3, -G1], BASE + 30 + 3000),
    ],
    ids=["at their gradients", "a row between", "one call", "in the other order", "the larger one first"],
)
def test_workspaces_of_one_call_add_up(order: list[int], peak: int) -> None:
    """By hand."""
    steps = [Step(n, -1, "x") if n > 0 else Step(-1, -n, "x") for n in order]
    outcome = replay_plan(STORAGES, NODES, [Step(0, -1, "x"), *steps], keep=frozenset({LOSS}))
    assert outcome.peak_bytes == peak
    with pytest.raises(IllegalPlanError, match="above the budget"):
        replay_plan(STORAGES, NODES, [Step(0, -1, "x"), *steps], keep=frozenset({LOSS}), budget_bytes=peak - 1)
