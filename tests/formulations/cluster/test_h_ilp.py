"""H-ILP: optimal where exhaustive search can tell, equal to RK-Checkmate on one block, every equation in the model."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.rk_checkmate.solve import rk_checkmate
from stowage.stages.formulations.cluster.h_ilp.equations import EQUATIONS, build
from stowage.stages.formulations.cluster.h_ilp.solve import h_ilp
from stowage.stages.formulations.cluster.problem import HProblem, flat
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.h_graph import HCluster, HGraph, HOption, HRun, HStep
from stowage.stages.simulate.h_graph import replay_h_graph
from stowage.stages.solver.equations import constraint_prefix
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.block.budgets import blocks_and_budgets
from tests.formulations.cluster.h_brute import fastest_h
from tests.formulations.cluster.h_graphs import HBuilder, checked_h, h_graphs_and_budgets, small_h_graphs
from tests.matrix import examples, some

LIMITS = SolverSettings(time_limit_s=600.0)


def two_contributors() -> HGraph:
    """Two clusters whose backwards both add to the gradient of the first value."""
    b = HBuilder()
    x, y, z = b.value("x", 2), b.value("y", 2), b.value("z", 2)
    gx, gy, gz, g = b.value("gx", 2), b.value("gy", 2), b.value("gz", 2), b.value("g", 1)
    b.node("f0", [], [x], HRun(1.0))
    b.node("f1", [x], [y], HRun(1.0))
    b.node("f2", [x, y], [z], HRun(1.0))
    b.loss = b.node("loss", [z], [gz], HRun(0.0), once=True)
    b.node("b2", [gz], [gx, gy])
    b.node("b1", [gy], [gx])
    b.node("b0", [gx], [g])

    def option(phantom: int, reads: tuple[int, ...]) -> HOption:
        backward = HRun(3.0 - phantom / 4, (HStep(phantom + 1), HStep(1, phantom_released_bytes=phantom)), reads)
        return HOption(f"{phantom}", phantom, HRun(1.0, (HStep(phantom),)), backward)

    b.clusters = [
        HCluster(0, 6, (option(4, ()), option(0, ()))),
        HCluster(1, 5, (option(4, ()), option(0, (x,)))),
        HCluster(2, 4, (option(4, ()), option(0, (x, y)))),
    ]
    return b.build([g])


@settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(h_graphs_and_budgets())
def test_equals_exhaustive_search(case: tuple[HGraph, int, int]) -> None:
    graph, peak, save = case
    best = fastest_h(graph, peak, save)
    (answer,) = h_ilp(graph, [(peak, save)], LIMITS)
    if best is None:
        assert answer.feasible is False
        assert answer.schedule is None
        return
    assert answer.schedule is not None
    assert answer.report is not None
    assert answer.report.status == "optimal"
    assert abs(checked_h(graph, answer.schedule, peak, save).time_s - best) < 1e-6
    assert abs(answer.report.objective_s - best) < 1e-6


@pytest.mark.parametrize(
    ("peak", "save"),
    some([(40, 40), (17, 17), (15, 12), (13, 8), (12, 6), (11, 4)], keep=[(40, 40), (15, 12), (11, 4)]),
)
def test_gradients_with_two_contributors(peak: int, save: int) -> None:
    graph = two_contributors()
    best = fastest_h(graph, peak, save)
    (answer,) = h_ilp(graph, [(peak, save)], LIMITS)
    assert (best is None) == (answer.schedule is None)
    if best is not None and answer.schedule is not None:
        assert abs(checked_h(graph, answer.schedule, peak, save).time_s - best) < 1e-6


@settings(max_examples=examples(8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets())
def test_a_flat_graph_has_the_optimum_of_rk_checkmate(case: tuple[BlockGraph, int, int]) -> None:
    block, peak, save = case
    report = rk_checkmate(block, peak, save, LIMITS)[1]
    (answer,) = h_ilp(flat(block), [(peak, save)], LIMITS)
    assert (report is None) == (answer.feasible is False)
    if report is not None and answer.report is not None and answer.schedule is not None:
        assert abs(report.objective_s - answer.report.objective_s) < 1e-6
        checked_h(flat(block), answer.schedule, peak, save)


@settings(max_examples=examples(6), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(h_graphs_and_budgets())
def test_without_corrections_nothing_is_faster(case: tuple[HGraph, int, int]) -> None:
    graph, peak, save = case
    (exact,) = h_ilp(graph, [(peak, save)], LIMITS)
    (coarse,) = h_ilp(graph, [(peak, save)], LIMITS, corrections=False)
    if coarse.schedule is not None and coarse.report is not None:
        checked_h(graph, coarse.schedule, peak, save)
        assert exact.report is not None
        assert exact.report.objective_s <= coarse.report.objective_s + 1e-6


def test_corrections_find_what_fits_only_with_them() -> None:
    """The input goes before the output is made: 3.33 sees both at once."""
    b = HBuilder()
    x, y, g, gx = b.value("x", 8), b.value("y", 8), b.value("g", 1), b.value("gx", 1)
    b.node("f0", [], [x], HRun(1.0))
    b.node("f1", [x], [y], HRun(1.0, (HStep(1, unborn=(y,)), HStep(1, released=(x,)))))
    b.loss = b.node("loss", [y], [g], HRun(0.0), once=True)
    b.node("b", [g], [gx], HRun(1.0))
    graph = b.build([gx])
    (fits,) = h_ilp(graph, [(9, 9)], LIMITS)
    assert fits.schedule is not None
    assert checked_h(graph, fits.schedule, 9, 9).peak_bytes == 9
    assert h_ilp(graph, [(8, 9)], LIMITS)[0].feasible is False
    # Keeping all fits, by the byte; the model without corrections sees it from 17 bytes on.
    for peak, status in ((16, "heuristic"), (17, "optimal")):
        (coarse,) = h_ilp(graph, [(peak, 9)], LIMITS, corrections=False)
        assert coarse.report is not None
        assert coarse.report.status == status


def test_several_budgets_and_both_solvers_agree() -> None:
    graph = two_contributors()
    budgets = [(40, 40), (15, 12), (12, 6), (3, 3)]
    by_highs = h_ilp(graph, budgets, LIMITS)
    assert [answer.budgets for answer in by_highs] == budgets
    assert by_highs[-1].feasible is False
    times = [answer.report.objective_s for answer in by_highs if answer.report is not None]
    assert times == sorted(times)
    by_cbc = h_ilp(graph, budgets[1:2], LIMITS, solver="cbc")
    assert by_cbc[0].report is not None
    assert abs(by_cbc[0].report.objective_s - times[1]) < 1e-6


def test_a_limit_is_reported() -> None:
    graph, hurry = two_contributors(), SolverSettings(time_limit_s=1e-6)
    by_rule, nothing = h_ilp(graph, [(12, 6), (10, 4)], hurry)
    assert by_rule.schedule is not None
    assert by_rule.report is not None
    assert by_rule.report.status == "heuristic"
    assert by_rule.report.bound_s < by_rule.report.objective_s
    checked_h(graph, by_rule.schedule, 12, 6)
    assert nothing.feasible is None
    assert nothing.report is not None
    assert nothing.report.objective_s == float("inf")


def test_every_equation_of_the_thesis_is_in_the_model() -> None:
    aliases = {20, 27, 28, 29, 30, 31, 32}
    numbers = {f"3.{n}" for n in range(4, 35) if n not in aliases}
    assert {n for n in EQUATIONS if n.startswith("3.")} == numbers
    data = HProblem(two_contributors())
    prefixes = {number: constraint_prefix(number) for number in EQUATIONS}
    found: set[str] = set()
    for corrections in (False, True):
        for name in build(data, 40, 40, corrections=corrections).problem.constraints:
            owners = [number for number, p in prefixes.items() if name == p or name.startswith(p + "_")]
            # eq_3_1 is no equation, so no prefix begins another but eq_3_4's, which eq_3_4_0 bears and 3.40 would.
            assert len(owners) == 1, name
            found.update(owners)
    assert found == set(EQUATIONS)
    for number, function in EQUATIONS.items():
        assert function.__doc__
        if number[0].isdigit():
            assert function.__name__ == prefixes[number]


def test_names_reach_the_solver() -> None:
    text = str(build(HProblem(two_contributors()), 40, 40).problem)
    for expected in ("eq_3_9_2:", "eq_3_14_5_5_1_0_0:", "eq_3_26_4_4_3:", "eq_3_34_6_6_0_0:", "eq_2_19:", "U_6_6:"):
        assert expected in text
    assert not re.search(r"^eq_3_33_", text, flags=re.MULTILINE)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(small_h_graphs(max_clusters=2))
def test_equal_inputs_give_an_equal_answer(graph: HGraph) -> None:
    budgets = [(100, 100), (12, 8)]
    first = h_ilp(graph, budgets, LIMITS)
    assert first == h_ilp(graph, budgets, LIMITS)
    assert first[0].schedule is not None
    replay_h_graph(graph, first[0].schedule)
