"""Options: the referee's numbers, nothing dominated, the same from any number of workers, never solved twice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from math import inf
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.fixed import keep_all
from stowage.stages.formulations.block.retention import smallest_peak
from stowage.stages.ir.block import BlockGraph, SolveReport
from stowage.stages.ir.encoding import decode, encode, schedule_of
from stowage.stages.ir.plan import Option
from stowage.stages.options import generate, intervals, tasks
from stowage.stages.options.exact import fastest_exact, solve_exactly
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.intervals import IntervalAnswer
from stowage.stages.options.store import OptionStore, option_key
from stowage.stages.options.tasks import GridSize
from stowage.stages.options.workers import pool
from stowage.stages.options.workers.worker import greedy_frontier_request, row_request
from stowage.stages.simulate.block import replay_block
from stowage.stages.solver.outcome import SolverSettings
from tests.matrix import examples
from tests.strategies import attention_block, deep_chain, mlp_block, small_blocks

SMALL = GridSize(peak_budgets=2, save_budgets=2, computations=2)
LIMITS = SolverSettings(time_limit_s=2.0)
FIXED = ("keep_all", "recompute_all")


def costs(o: Option) -> tuple[float, int, int, int]:
    """What options compete in."""
    return o.forward_time_s + o.backward_time_s, o.save_bytes, o.forward_peak_bytes, o.backward_peak_bytes


def solved(graph: BlockGraph, size: GridSize) -> list[Option]:
    """Options of one block."""
    return options_for_blocks([graph], size=size)[graph.content_hash()]


def check(graph: BlockGraph, options: list[Option]) -> None:
    """Everything that is promised of a block's options."""
    assert [o.option for o in options] == list(range(len(options)))
    assert {o.block_hash for o in options} == {graph.content_hash()}
    assert [o.formulation for o in options if o.formulation in FIXED].count("keep_all") == 1
    assert [o.formulation for o in options if o.formulation in FIXED].count("recompute_all") == 1
    for o in options:
        cost = replay_block(graph, schedule_of(o))
        assert dataclasses.asdict(cost) == {name: getattr(o, name) for name in dataclasses.asdict(cost)}
    times = [costs(o)[0] for o in options]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(times))
    for o in options:
        if o.formulation in FIXED:
            continue
        for other in options:
            if other.option != o.option:
                no_worse = all(a <= b for a, b in zip(costs(other)[1:], costs(o)[1:]))
                assert not (no_worse and costs(other)[0] <= costs(o)[0] - 1e-9)


@settings(max_examples=examples(8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(small_blocks(max_forward=4))
def test_small_blocks(graph: BlockGraph) -> None:
    check(graph, solved(graph, GridSize(peak_budgets=3, save_budgets=3, computations=2)))


def test_realistic_block_has_options_between_the_extremes() -> None:
    graph = mlp_block()
    options = solved(graph, GridSize(peak_budgets=3, save_budgets=3, computations=2))
    check(graph, options)
    assert len(options) >= 8
    # Half of the saved bytes for a few percent of time: what pointwise calls can rebuild.
    plain = options[0]
    half = [o for o in options if o.save_bytes <= plain.save_bytes / 2]
    assert costs(half[0])[0] <= 1.06 * costs(plain)[0]


def test_tw_remat_competes_where_blocks_are_solved_exactly() -> None:
    graph = attention_block()
    found = [f for f in tasks.grid(graph, GridSize(), LIMITS).found if f.report.formulation == "tw_remat"]
    saves = [replay_block(graph, f.schedule).save_bytes for f in found]
    assert min(saves) < replay_block(graph, keep_all(graph)).save_bytes


def test_large_blocks_take_the_greedy_frontier() -> None:
    graph = deep_chain(12)
    options = solved(graph, GridSize(max_exact_nodes=80, greedy_levels=8))
    check(graph, options)
    assert {o.formulation for o in options} <= {"selective", "tw_remat", *FIXED}


def test_workers_change_nothing_and_the_store_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [attention_block(), deep_chain(1), attention_block()]
    seen: list[tuple[int, int]] = []
    store = OptionStore(tmp_path)
    alone = options_for_blocks(graphs, None, size=SMALL, settings=LIMITS)
    shared = options_for_blocks(
        graphs, store, size=SMALL, settings=LIMITS, workers=2, progress=lambda done, all_: seen.append((done, all_))
    )
    assert alone == shared
    assert seen == [(1, 2), (2, 2)]
    for graph in graphs:
        check(graph, shared[graph.content_hash()])

    def refuse(*_: object) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr(pool, "perform", refuse)
    assert options_for_blocks(graphs, store, size=SMALL, settings=LIMITS) == shared
    with pytest.raises(AssertionError, match="solved again"):
        options_for_blocks(graphs, store, size=dataclasses.replace(SMALL, save_budgets=3), settings=LIMITS)


def test_a_damaged_file_is_solved_again(tmp_path: Path) -> None:
    graph, store = deep_chain(1), OptionStore(tmp_path)
    first = options_for_blocks([graph], store, size=SMALL, settings=LIMITS)
    path = store.path(option_key(graph.content_hash(), SMALL, LIMITS))
    good = path.read_bytes()
    for bad in (b"nonsense", good[: len(good) // 2]):
        path.write_bytes(bad)
        assert options_for_blocks([graph], store, size=SMALL, settings=LIMITS) == first
        assert path.read_bytes() == good


def test_a_cost_that_was_changed_in_the_file_is_not_trusted(tmp_path: Path) -> None:
    graph, store = deep_chain(1), OptionStore(tmp_path)
    first = options_for_blocks([graph], store, size=SMALL, settings=LIMITS)
    key = option_key(graph.content_hash(), SMALL, LIMITS)
    table = pq.read_table(store.path(key))
    place = table.schema.get_field_index("save_bytes")
    less = pc.subtract(table.column(place), 1).cast(table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), less), store.path(key))
    assert store.get(key, graph) is None
    assert options_for_blocks([graph], store, size=SMALL, settings=LIMITS) == first


def test_options_of_another_block_are_not_trusted(tmp_path: Path) -> None:
    one, two, store = deep_chain(1), attention_block(), OptionStore(tmp_path)
    options = options_for_blocks([one], size=SMALL, settings=LIMITS)[one.content_hash()]
    key = option_key(two.content_hash(), SMALL, LIMITS)
    store.put(key, options)
    assert store.get(key, two) is None


def test_a_failing_worker_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, object]:
        return {"task": "row", "graph": "{}"}

    monkeypatch.setattr(generate, "grid_request", broken)
    with pytest.raises(RuntimeError, match="a solver process failed: "):
        options_for_blocks([deep_chain(1)], None, size=SMALL, settings=LIMITS, workers=2)


def test_a_worker_stops_in_the_middle_of_a_solve_when_nobody_waits_for_it() -> None:
    """As after kill -9 of the planner: its end of the pipe closes."""
    graph, endless = attention_block(), SolverSettings(time_limit_s=1e6)
    size = GridSize(formulation="rk_checkmate")
    budgets = tasks.grid(graph, size, LIMITS)
    long = row_request(graph, budgets, budgets.peaks[2], size, endless)
    command = [sys.executable, "-m", "stowage.stages.options.workers.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for request in (greedy_frontier_request(deep_chain(1), size, LIMITS), long):
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        assert json.loads(worker.stdout.readline())["found"]
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(timeout=3)
        worker.stdin.close()
        assert worker.wait(timeout=600) == 0
        assert worker.stdout.read() == ""


def test_encoding_is_reversible() -> None:
    actions = decode((0, -1, 3, -4))
    assert encode(actions) == (0, -1, 3, -4)
    assert [(a.kind, a.index) for a in actions] == [("compute", 0), ("free", 0), ("compute", 3), ("free", 3)]


@pytest.mark.parametrize("formulation", ["rk_checkmate", "checkmate"])
def test_other_exact_formulations_take_the_place_of_the_usual_one(formulation: str) -> None:
    graph, patient = deep_chain(1), SolverSettings(time_limit_s=600.0)
    size = GridSize(3, 3, computations=4)
    budgets = tasks.grid(graph, size, patient)
    peak = budgets.peaks[1]

    def times_s(chosen: str) -> list[float]:
        """The fastest within each save budget."""
        found = tasks.row(
            graph, peak, budgets.saves, dataclasses.replace(size, formulation=chosen), patient, budgets.smallest
        )
        asked = [one for one in found if one.report.formulation == chosen]
        assert asked
        assert all(one.report.status == "optimal" for one in asked)
        costs = [replay_block(graph, one.schedule) for one in found]
        assert all(max(c.forward_peak_bytes, c.backward_peak_bytes) <= peak for c in costs)
        within = [[c for c in costs if c.save_bytes <= save] for save in budgets.saves]
        return [min((c.forward_time_s + c.backward_time_s for c in inside), default=inf) for inside in within]

    usual, other = times_s("retention"), times_s(formulation)
    assert all(a <= b * (1 + 1e-9) for a, b in zip(usual, other, strict=True))
    if formulation == "rk_checkmate":
        assert usual == pytest.approx(other)


def test_checkmate_wins_where_a_node_must_run_more_often() -> None:
    graph, patient = deep_chain(1), SolverSettings(time_limit_s=600.0)
    budgets = tasks.grid(graph, GridSize(), patient)
    pair = budgets.peaks[1], budgets.saves[-1]
    few = solve_exactly("retention", graph, pair, patient, computations=1, within=None, near=None)
    usual = solve_exactly("retention", graph, pair, patient, computations=3, within=None, near=None)
    assert usual.report is not None
    assert few.schedule is None
    winner = fastest_exact(few, graph, pair, patient)
    assert winner.report is not None
    assert winner.report.formulation == "rk_checkmate"
    assert winner.report.objective_s == pytest.approx(usual.report.objective_s)
    assert fastest_exact(usual, graph, pair, patient) is usual, "no faster"


@pytest.mark.parametrize(("tiny_nodes", "count"), [(0, 0), (100, 1)])
def test_checkmate_takes_part_where_blocks_are_small(
    tiny_nodes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def noted(
        answer: IntervalAnswer, graph: BlockGraph, budgets: tuple[int, int], limits: SolverSettings
    ) -> IntervalAnswer:
        asked.append(budgets)
        return fastest_exact(answer, graph, budgets, limits)

    monkeypatch.setattr(tasks, "fastest_exact", noted)
    graph = deep_chain(1)
    size = GridSize(3, 3, tiny_nodes=tiny_nodes)
    budgets = tasks.grid(graph, size, LIMITS)
    tasks.row(graph, budgets.peaks[1], budgets.saves[-1:], size, LIMITS, budgets.smallest)
    assert asked == [(budgets.peaks[1], budgets.saves[-1])] * count


def test_a_third_computation_is_tried_where_two_do_not_fit() -> None:
    graph = deep_chain(3)
    two, three = (smallest_peak(graph, LIMITS, computations=count)[1] for count in (2, 3))
    assert three < two
    for peak, most in ((two, 2), (three, 3)):
        answer = solve_exactly("retention", graph, (peak, peak), LIMITS, computations=3, within=None, near=None)
        assert answer.executions is not None
        assert max(map(len, answer.executions.values())) == most
    nothing = solve_exactly("retention", graph, (three, three), LIMITS, computations=2, within=None, near=None)
    assert nothing.schedule is None


def test_backward_nodes_once_is_the_answer_where_time_for_more_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = deep_chain(3)
    least = smallest_peak(graph, LIMITS, computations=3)[1]
    proven, cut = (_with_share(monkeypatch, graph, least, share) for share in (1.0, 1e-9))
    assert proven.report is not None
    assert cut.report is not None
    assert (proven.report.status, cut.report.status) == ("optimal", "feasible")
    assert cut.report.bound_s <= proven.report.objective_s <= cut.report.objective_s
    assert cut.schedule is not None
    cost = replay_block(graph, cut.schedule)
    assert max(cost.forward_peak_bytes, cost.backward_peak_bytes) <= least
    assert all(len(stages) == 1 for k, stages in (cut.executions or {}).items() if k > graph.forward_count)


def _with_share(monkeypatch: pytest.MonkeyPatch, graph: BlockGraph, peak: int, share: float) -> IntervalAnswer:
    monkeypatch.setattr(intervals, "_SHORT", share)
    return solve_exactly("retention", graph, (peak, peak), LIMITS, computations=3, within=None, near=None)


@pytest.mark.parametrize("found_in_time", [True, False])
def test_tight_rows_start_from_the_smallest_peak_and_spend_less_on_what_is_not_proven(
    found_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = attention_block()
    size, limits = GridSize(2, 4), SolverSettings(time_limit_s=2.0)
    budgets = tasks.grid(graph, size, limits)
    smallest = dict(enumerate(map(list, budgets.smallest)))
    asked: list[tuple[int, float, object]] = []
    answer = keep_all(graph) if found_in_time else None
    unproven = SolveReport("retention", "feasible", 1.0 if found_in_time else inf, 0.0)

    def solve(
        formulation: str, block: BlockGraph, pair: tuple[int, int], settings: SolverSettings, **starts: object
    ) -> IntervalAnswer:
        asked.append((pair[1], settings.time_limit_s, starts["within"]))
        return IntervalAnswer(answer, unproven, None)

    monkeypatch.setattr(tasks, "solve_exactly", solve)
    monkeypatch.setattr(tasks, "best_within", lambda *_: None)
    saves = [sum(a.nbytes for a in graph.allocations), *budgets.saves[1:]]
    tasks.row(graph, budgets.peaks[-1], saves, size, limits, budgets.smallest)
    assert asked[0] == (saves[0], 2.0, smallest)
    # Keep-all's answer fits no smaller budget; where nothing was found in time, smaller budgets are not tried.
    assert [limit for _, limit, _ in asked] == ([2.0, 1.0, 0.5, 0.25] if found_in_time else [2.0])
