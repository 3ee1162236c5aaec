"""RK-Rotor on H-Graphs: legal on any graph, the optimum of small chains, and on long ones better than policies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.cluster.as_chain import HChain
from stowage.stages.formulations.cluster.h_ilp.solve import h_ilp
from stowage.stages.formulations.cluster.lazy import HCandidate
from stowage.stages.formulations.cluster.policies import Incumbents, greedy, keep_all, recompute_all, starts
from stowage.stages.formulations.cluster.problem import HProblem, flat
from stowage.stages.formulations.cluster.retention.solve import h_retention, smallest_peak
from stowage.stages.formulations.cluster.rotor import HRotor, is_sequence
from stowage.stages.formulations.cluster.staged_order import cost_of, schedule_of, timeline
from stowage.stages.ir.h_graph import HGraph, HRun, HStep
from stowage.stages.simulate.h_graph import replay_h_graph
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cluster.h_brute import fastest_h
from tests.formulations.cluster.h_graphs import HBuilder, h_graphs_and_budgets, layered, small_h_graphs
from tests.matrix import examples, some
from tests.strategies import attention_block, deep_chain

LIMITS = SolverSettings(time_limit_s=20.0)
SAME = 1e-9
FORM = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def chain_of(data: HProblem) -> HChain:
    chain = HChain.of(data)
    assert chain is not None
    return chain


def rotor_of(data: HProblem) -> HRotor:
    """Whether it applies or not."""
    return HRotor(chain_of(data), keep_all(data).cost.peak_bytes)


def fastest(data: HProblem, peak: int, save: int) -> HCandidate | None:
    """RK-Rotor's fastest plan within budgets."""
    fitting = [c for c in rotor_of(data).near(peak, save) if c.cost.within(peak, save)]
    return min(fitting, key=lambda c: c.cost.time_s, default=None)


def judge(data: HProblem, found: HCandidate) -> None:
    cost = replay_h_graph(data.graph, schedule_of(data, found.events))
    assert (cost.peak_bytes, cost.save_bytes) == (found.cost.peak_bytes, found.cost.save_bytes)
    assert abs(cost.time_s - found.cost.time_s) < SAME


@st.composite
def with_nodes_that_run_once(draw: st.DrawFn) -> HGraph:
    """As `small_h_graphs`, but some forward nodes may run only once; clusters then have no fast-forward."""
    graph = draw(small_h_graphs())
    clusters = {c.forward for c in graph.clusters}
    nodes = list(graph.nodes)
    for k in range(graph.loss):
        if draw(st.booleans()):
            nodes[k] = replace(nodes[k], once=True, plain=None if k in clusters else nodes[k].plain)
    found = replace(graph, nodes=tuple(nodes))
    found.check()
    return found


def singles(count: int, *, once: int = -1, far: bool = False) -> HGraph:
    """A chain of operations without clusters, each of 4 bytes and 1 s, whose backward reads what it read; `once` may
    run only once; with `far` each reads the last two values."""
    b = HBuilder()
    values = [b.value(f"x{k}", 4) for k in range(count)]
    for k in range(count):
        b.node(f"f{k}", values[max(0, k - 1 - far) : k], [values[k]], HRun(1.0), once=k == once)
    gradients = [b.value(f"g{k}", 1) for k in range(count)]
    end = b.value("end", 1)
    b.loss = b.node("loss", values[-1:], gradients[-1:], HRun(0.0), once=True)
    for k in reversed(range(count)):
        b.node(f"b{k}", [gradients[k], *(values[k - 1 : k] if k else [])], [gradients[k - 1] if k else end], HRun(1.0))
    return b.build([end])


@settings(max_examples=examples(60), **FORM)
@given(st.one_of(small_h_graphs(), with_nodes_that_run_once()), st.floats(0.0, 1.0))
def test_plans_are_legal_and_cost_what_they_say(graph: HGraph, share: float) -> None:
    data = HProblem(graph)
    rotor = rotor_of(data)
    budget = int(keep_all(data).cost.peak_bytes * share)
    for found in (*rotor.near(budget, budget), *rotor.smallest):
        judge(data, found)


@settings(max_examples=examples(40), **FORM)
@given(h_graphs_and_budgets())
def test_no_better_than_the_best_and_no_better_than_the_greedy(case: tuple[HGraph, int, int]) -> None:
    graph, peak, save = case
    found = fastest(HProblem(graph), peak, save)
    if found is None:
        return
    best = fastest_h(graph, peak, save)
    assert best is not None
    assert found.cost.time_s >= best - SAME
    if is_sequence(chain_of(HProblem(graph))):
        answer = greedy(graph, peak, save)
        assert answer is not None
        assert answer.report is not None
        assert answer.report.objective_s <= found.cost.time_s + SAME


@settings(max_examples=examples(40), **FORM)
@given(small_h_graphs())
def test_with_memory_to_spare_nothing_runs_again(graph: HGraph) -> None:
    data = HProblem(graph)
    found = fastest(data, 10**6, 10**6)
    assert found is not None
    assert abs(found.cost.time_s - data.floor_s) < SAME


@pytest.mark.parametrize("share", some([0.9, 0.7, 0.5, 0.35, 0.25], keep=[0.9, 0.5, 0.25]))
def test_the_optimum_of_a_small_chain_of_clusters(share: float) -> None:
    graph = layered(4, 2, skips=False)
    data = HProblem(graph)
    budget = int(keep_all(data).cost.peak_bytes * share)
    (exact,) = h_ilp(graph, [(budget, budget)], LIMITS)
    found = fastest(data, budget, budget)
    assert exact.report is not None
    assert exact.report.status == "optimal"
    assert found is not None
    assert abs(found.cost.time_s - exact.report.objective_s) < 1e-4


@pytest.mark.parametrize(("count", "share"), some([(16, 0.5), (16, 0.3), (24, 0.2)], keep=[(16, 0.3)]))
def test_beats_chen_on_a_chain(count: int, share: float) -> None:
    graph = layered(count, 1, skips=False)
    data = HProblem(graph)
    budget = int(keep_all(data).cost.peak_bytes * share)
    found = fastest(data, budget, budget)
    assert found is not None
    judge(data, found)
    fixed = [c.cost.time_s for c in starts(data) if c.cost.within(budget, budget)]
    assert found.cost.time_s < min(fixed, default=float("inf"))
    assert found.cost.time_s > data.floor_s + SAME


def test_where_no_policy_fits_some_run_more_than_twice() -> None:
    data = HProblem(layered(20, 1, skips=False))
    least = min(rotor_of(data).smallest, key=lambda c: c.cost.peak_bytes)
    judge(data, least)
    assert least.cost.peak_bytes < 0.5 * min(c.cost.peak_bytes for c in starts(data))
    assert max(len(runs) for runs in least.runs.values()) > 2


def test_options_are_better_than_the_fastest_alone() -> None:
    graph = layered(12, 5, skips=False)
    alone = replace(graph, clusters=tuple(replace(c, options=c.options[:1]) for c in graph.clusters))
    budget = keep_all(HProblem(graph)).cost.peak_bytes // 3
    rk_rotor, rotor = (fastest(HProblem(g), budget, budget) for g in (graph, alone))
    assert rk_rotor is not None
    assert rotor is not None
    assert rk_rotor.cost.time_s < rotor.cost.time_s


def test_the_optimum_of_a_chain_of_operations_under_every_budget() -> None:
    data = HProblem(singles(5))
    assert chain_of(data).owner == {6: 4, 7: 3, 8: 2, 9: 1, 10: 1}  # the last backward reads nothing of its own
    times, slower = [], {}
    for budget in range(keep_all(data).cost.peak_bytes, 0, -1):
        best, found = fastest_h(data.graph, budget, budget), fastest(data, budget, budget)
        assert (best is None) == (found is None)
        if best is not None and found is not None:
            times.append(best)
            if found.cost.time_s != best:
                slower[budget] = found.cost.time_s - best
    # What Rotor keeps it keeps until the backward it is for; here one budget has a faster schedule that does not.
    assert slower == {12: 1.0}
    assert min(times) == data.floor_s
    assert max(times) > 1.5 * data.floor_s


def test_what_runs_once_is_held() -> None:
    data = HProblem(singles(7, once=3))
    least = min(rotor_of(data).smallest, key=lambda c: c.cost.peak_bytes)
    judge(data, least)
    assert len(least.runs[3]) == 1
    assert max(len(runs) for runs in least.runs.values()) > 1
    assert least.cost.peak_bytes < keep_all(data).cost.peak_bytes


def test_it_applies_to_sequences() -> None:
    chain, crossed = HProblem(singles(10)), HProblem(singles(10, far=True))
    assert chain_of(chain).crossing_bytes == 0
    assert HRotor.where_it_applies(chain, 1) is not None
    # All but the last two values are read beyond the next operation.
    assert chain_of(crossed).crossing_bytes == 8 * 4
    assert HRotor.where_it_applies(crossed, 1) is None


def test_clusters_whose_backwards_are_not_in_reverse_are_no_chain() -> None:
    b = HBuilder()
    x, y, gx, gy, end = (b.value(name, 1) for name in ("x", "y", "gx", "gy", "end"))
    b.node("f0", [], [x], HRun(1.0))
    b.node("f1", [], [y], HRun(1.0))
    b.loss = b.node("loss", [x, y], [gx, gy], HRun(0.0), once=True)
    graph = layered(2, 1, skips=False)
    for k, gradient in ((0, gx), (1, gy)):
        backward = b.node(f"b{k}", [gradient], [end])
        option = replace(graph.clusters[0].options[0], forward=HRun(1.0), backward=HRun(1.0, (HStep(1),)))
        b.clusters.append(replace(graph.clusters[0], forward=k, backward=backward, options=(option,)))
    assert HChain.of(HProblem(b.build([end]))) is None
    assert greedy(b.build([end]), 10**9, 10**9) is not None


def test_incumbents_are_never_worse_and_say_who_found_them() -> None:
    names = set()
    for graph in (layered(16, 1, skips=False), layered(8, 4, skips=False)):
        data = HProblem(graph)
        incumbents, most = Incumbents(data), keep_all(data).cost.peak_bytes
        for share in (0.7, 0.4, 0.25, 0.15):
            budget = int(most * share)
            by_rotor, (found, *slower) = fastest(data, budget, budget), incumbents.within(budget, budget)
            assert by_rotor is not None
            cost = cost_of(data, timeline(data, found.runs))
            assert cost.within(budget, budget)
            assert cost.time_s <= by_rotor.cost.time_s
            assert all(cost.time_s <= cost_of(data, timeline(data, other.runs)).time_s for other in slower)
            if found.name == "h_rotor":
                assert cost.time_s == by_rotor.cost.time_s
            names.add(found.name)
    assert names == {"h_rotor", "h_greedy"}


def test_a_solve_that_has_no_time_answers_with_rk_rotors_plan() -> None:
    graph = layered(16, 1, skips=False)
    data = HProblem(graph)
    budget = keep_all(data).cost.peak_bytes // 5
    by_rotor = fastest(data, budget, budget)
    (answer,) = h_retention(graph, [(budget, budget)], SolverSettings(time_limit_s=1e-6))
    assert by_rotor is not None
    assert answer.report is not None
    assert answer.report.status == "heuristic"
    assert answer.report.objective_s <= by_rotor.cost.time_s


def test_the_smallest_peak_is_no_larger_than_rk_rotors() -> None:
    data = HProblem(layered(16, 1, skips=False))
    least = min(c.cost.peak_bytes for c in rotor_of(data).smallest)
    assert least < min(c.cost.peak_bytes for c in starts(data))
    runs, peak = smallest_peak(Incumbents(data), SolverSettings(time_limit_s=1e-6))
    assert peak == least
    assert cost_of(data, timeline(data, runs)).peak_bytes == peak


def test_blocks_of_operations() -> None:
    for block in (attention_block(), deep_chain(3)):
        data = HProblem(flat(block))
        rotor = rotor_of(data)
        for found in rotor.smallest:
            judge(data, found)
        most, least = keep_all(data).cost.peak_bytes, min(c.cost.peak_bytes for c in rotor.smallest)
        assert least < most
        middle = fastest(data, (most + least) // 2, most)
        assert middle is not None
        assert data.floor_s < middle.cost.time_s < recompute_all(data).cost.time_s
