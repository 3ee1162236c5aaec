"""The table of plan actions: every action has its row, its rule and its line; a new one needs these three alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast, get_args

import pytest

from stowage.stages.codegen.actions import LINES, Actions
from stowage.stages.ir.actions import ACTIONS, LANES, Kind, Lane, LaneName, PlanAction, shown_lanes
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.plan import PlanRow, plan_hash
from stowage.stages.ir.spans import chrome_trace, predicted_spans
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceMeta, TraceTables
from stowage.stages.report.streams import streams_figure, streams_tables
from stowage.stages.simulate.plan import Outcome, replay_plan
from stowage.stages.simulate.replay import RULES, Replay
from tests.simulate.small_plans import node, storage


def test_every_action_has_a_row_a_rule_and_a_line() -> None:
    assert set(get_args(PlanAction)) == ACTIONS.keys() == RULES.keys() == LINES.keys()
    assert set(get_args(LaneName)) == LANES.keys()
    assert {kind.lane for kind in ACTIONS.values()} <= set(shown_lanes())


def test_first_letters_differ() -> None:
    """A plan's hash has only these."""
    assert len({action[0] for action in ACTIONS}) == len(ACTIONS)


def test_what_goes_on_beside_computing_has_a_lane_of_its_own() -> None:
    for kind in ACTIONS.values():
        assert kind.beside == (kind.lane != "compute")
        assert not (kind.beside and kind.ends)
        assert not kind.transfers or LANES[kind.lane].carrier == "link"


def test_steps_know_their_action() -> None:
    assert Step(3, -1, "").kind == "compute"
    assert Step(-1, 3, "").kind == "free"
    assert Step(3, 4, "", "update").kind == "update"
    assert Step(-1, 4, "", "wait").kind == "wait"


GATHER = cast(PlanAction, "gather")
NETWORK = cast(LaneName, "network")
SHARD, FULL, X, LOSS = range(4)
STORAGES = [storage(SHARD, 100, "parameter", "shard"), storage(FULL, 400, name="full"), storage(X, 8), storage(LOSS, 1)]
NODES = [
    node(0, [], [X], time_s=2.0),
    node(1, [SHARD], [FULL], time_s=5.0, name="all_gather"),
    node(2, [FULL, X], [LOSS], time_s=3.0),
]


def gather(replay: Replay, number: int, step: Step) -> None:
    """A collective makes a whole weight of shards: its memory is taken now, and read after the wait."""
    found = replay.nodes[step.node]
    if not replay.live.issuperset(found.reads):
        raise replay.wrong(number, step, "reads a shard that is not in memory")
    if step.storage in replay.live:
        raise replay.wrong(number, step, "is still in memory")
    replay.live.add(step.storage)
    replay.reloading.add(step.storage)
    replay.used += replay.size[step.storage]
    replay.runs[found.node] += 1
    replay.note(number, step)


def write_gather(actions: Actions, row: PlanRow) -> None:
    """Its line in generated code."""
    actions.under_way[row.storage] = "reloading"
    actions.names.lines.append(f"run.gather({actions.nodes[row.node].name!r})")


@pytest.fixture
def collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table of actions, a row of the table of lanes, a rule and a line."""
    monkeypatch.setitem(LANES, NETWORK, Lane("apart"))
    row = Kind(NETWORK, beside=True, on_node=True, takes_device_memory=True, colour="#112233", total="collectives")
    monkeypatch.setitem(ACTIONS, GATHER, row)
    monkeypatch.setitem(RULES, GATHER, gather)
    monkeypatch.setitem(LINES, GATHER, write_gather)


def steps(order: str) -> list[Step]:
    """Letters: g starts the collective, w waits for it, a number computes, - frees the whole weight, x frees x."""
    known = {"g": Step(1, FULL, "F0", GATHER), "w": Step(-1, FULL, "F0", "wait")}
    known |= {"-": Step(-1, FULL, "F0"), "x": Step(-1, X, "F0")}
    return [known[letter] if letter in known else Step(int(letter), -1, "F0") for letter in order]


def play(order: str, **more: Any) -> Outcome:
    return replay_plan(STORAGES, NODES, steps(order), keep=frozenset({LOSS}), **more)


@pytest.mark.usefixtures("collective")
def test_a_collective_runs_beside_computing_on_a_lane_of_its_own() -> None:
    outcome = play("g0w2-x")
    assert [r.action for r in outcome.rows] == ["gather", "compute", "wait", "compute", "free", "free"]
    assert [(r.start_s, r.end_s) for r in outcome.rows[:4]] == [(0, 5), (0, 2), (2, 5), (5, 8)]
    assert (outcome.time_s, outcome.wait_s) == (8.0, 3.0)
    assert outcome.rows[0].resident_bytes == 500
    assert outcome.peak_bytes == 100 + 400 + 8 + 1
    assert play("0gw2-x").time_s == 2 + 5 + 3
    assert outcome.lower_tier_bytes == outcome.reload_bytes == 0, "nothing is copied between tiers"


@pytest.mark.usefixtures("collective")
def test_the_referee_knows_its_rule() -> None:
    with pytest.raises(IllegalPlanError, match=r"row 1 .* node n2 reads full, not in memory"):
        replay_plan(STORAGES, NODES, [*steps("0"), *steps("2")])
    with pytest.raises(IllegalPlanError, match="node n2 reads full, not in memory"):
        play("g02-wx")
    with pytest.raises(IllegalPlanError, match=r"row 1 .* gather of all_gather is still in memory"):
        play("ggw02-x")
    with pytest.raises(IllegalPlanError, match="needs 500 bytes, above the budget of 499"):
        play("g0w2-x", budget_bytes=499)


@pytest.mark.usefixtures("collective")
def test_it_is_in_pictures_and_reports() -> None:
    spans = predicted_spans(play("g0w2-x").rows, NODES)
    assert [(s.name, s.start_s, s.end_s) for s in spans if s.stream == GATHER] == [("all_gather", 0.0, 5.0)]
    events = json.loads(chrome_trace(spans))["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    assert [threads[e["tid"]] for e in events if e["name"] == "all_gather"] == ["network"]
    figure = streams_figure(spans)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["compute", "network"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "wait", "gather"]
    assert "collectives" in streams_tables(spans)


@pytest.mark.usefixtures("collective")
def test_it_has_a_line_in_generated_code() -> None:
    meta = TraceMeta("", "", "cpu", "", LOSS, "", 0)
    trace = TraceTables(STORAGES, [], [], [], [], meta)
    rows = play("g0w2-x").rows
    actions = Actions(trace, NODES, rows, [])
    actions.write(rows[0])
    assert actions.names.lines == ["run.gather('all_gather')"]


@pytest.mark.usefixtures("collective")
def test_plans_with_it_have_names_of_their_own() -> None:
    rows = play("g0w2-x").rows
    other = [replace(rows[0], action="compute"), *rows[1:]]
    assert plan_hash(rows, "c", 1) != plan_hash(other, "c", 1)
