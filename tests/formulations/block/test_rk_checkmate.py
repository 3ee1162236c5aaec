"""RK-Checkmate: optimal where exhaustive search can tell, and every equation is in the model."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.rk_checkmate.model import EQUATIONS, build
from stowage.stages.formulations.block.rk_checkmate.solve import rk_checkmate
from stowage.stages.formulations.block.staged_order import StagedGraph, run_once
from stowage.stages.ir.block import BlockGraph
from stowage.stages.simulate.block import replay_block
from stowage.stages.solver.equations import constraint_prefix
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.block.brute import fastest
from tests.formulations.block.budgets import blocks_and_budgets, checked, peak_of, total_s
from tests.matrix import examples
from tests.strategies import BlockBuilder, small_blocks

LIMITS = SolverSettings(time_limit_s=600.0)


def phantom_block() -> BlockGraph:
    """Two layers, the first with a phantom that costs 8 to keep and 1 second to make again."""
    b = BlockBuilder()
    x, phantom = b.add("f0", 1.0, [], 4, 8)
    (y,) = b.add("f1", 2.0, [x], 4)
    (g,) = b.loss([y])
    (gx,) = b.add("b1", 2.0, [g, x], 4)
    (g0,) = b.add("b0", 1.0, [gx, phantom], 4)
    return b.build([g0])


@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets())
def test_equals_exhaustive_search(case: tuple[BlockGraph, int, int]) -> None:
    graph, peak, save = case
    best = fastest(graph, peak, save)
    schedule, report = rk_checkmate(graph, peak, save, LIMITS)
    if best is None:
        assert schedule is None
        assert report is None
        return
    assert schedule is not None
    assert report is not None
    assert report.status == "optimal"
    assert abs(total_s(checked(graph, schedule, peak, save)) - best) < 1e-6
    assert abs(report.objective_s - best) < 1e-6
    # The staged order is a restriction: any order can only be as fast or faster.
    anyhow = fastest(graph, peak, save, staged=False)
    assert anyhow is not None
    assert anyhow <= best


@settings(max_examples=examples(6), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets(max_forward=2))
def test_cbc_and_warm_starts_give_the_same_optimum(case: tuple[BlockGraph, int, int]) -> None:
    graph, peak, save = case
    best = fastest(graph, peak, save)
    by_cbc = rk_checkmate(graph, peak, save, LIMITS, solver="cbc")[1]
    # Running everything once may break the budgets: then the start is no solution, and must do no harm.
    started = rk_checkmate(graph, peak, save, LIMITS, hint=run_once(StagedGraph.of(graph)))[1]
    for report in (by_cbc, started):
        assert (report is None) == (best is None)
        assert report is None or best is None or abs(report.objective_s - best) < 1e-6


def test_a_phantom_is_fast_forwarded_and_made_again() -> None:
    graph = phantom_block()
    schedule, report = rk_checkmate(graph, 20, 8, LIMITS)
    assert schedule is not None
    assert report is not None
    assert report.objective_s == 7.0
    cost = replay_block(graph, schedule)
    assert cost.recomputed_bytes >= 8
    # Fast-forward makes the phantom in passing: its bytes are in the forward peak.
    assert cost.forward_peak_bytes == 12
    assert rk_checkmate(graph, 11, 8, LIMITS) == (None, None)


def test_a_once_node_is_never_made_again() -> None:
    b = BlockBuilder()
    (x,) = b.add("f0", 1.0, [], 8, once=True)
    (y,) = b.add("f1", 1.0, [x], 2)
    (g,) = b.loss([y])
    (gx,) = b.add("b0", 1.0, [g, x], 2)
    graph = b.build([gx])
    assert rk_checkmate(graph, 100, 2, LIMITS) == (None, None)
    assert rk_checkmate(graph, 100, 10, LIMITS)[0] is not None


def test_every_equation_of_the_thesis_is_in_the_model() -> None:
    numbers = {f"2.{n}" for n in range(3, 20)}
    assert {n for n in EQUATIONS if n[0].isdigit()} == numbers
    model = build(phantom_block(), 20, 8)
    names = list(model.problem.constraints)
    prefixes = {number: constraint_prefix(number) for number in EQUATIONS}
    for number, prefix in prefixes.items():
        assert any(re.fullmatch(rf"{prefix}(_.*)?", name) for name in names), number
    # Longest prefix first: eq_2_1 must not claim eq_2_10.
    for name in names:
        owners = [p for p in prefixes.values() if name == p or name.startswith(p + "_")]
        assert len(owners) == 1, name
    for number, function in EQUATIONS.items():
        assert function.__doc__
        if number[0].isdigit():
            assert function.__name__ == prefixes[number]


def test_names_reach_the_solver() -> None:
    text = str(build(phantom_block(), 20, 8).problem)
    for expected in ("eq_2_3:", "eq_2_6_2:", "eq_2_9_first_1:", "eq_2_16_hazard_", "eq_2_18_4_4:", "eq_2_19:"):
        assert expected in text


@settings(max_examples=3, deadline=None, derandomize=True)
@given(small_blocks(max_forward=3))
def test_equal_inputs_give_an_equal_schedule(graph: BlockGraph) -> None:
    from stowage.stages.formulations.block.fixed import keep_all

    plain = replay_block(graph, keep_all(graph))
    budgets = peak_of(plain) - 1, plain.save_bytes
    assert rk_checkmate(graph, *budgets, LIMITS) == rk_checkmate(graph, *budgets, LIMITS)


def test_the_staged_order_is_a_restriction() -> None:
    """Where the given order is bad, running its nodes in another would be faster: the price of the staged model."""
    b = BlockBuilder()
    (x,) = b.add("f0", 1.0, [], 1)
    (g,) = b.loss([x])
    (early,) = b.add("early", 5.0, [g], 10)
    (late,) = b.add("late", 1.0, [g], 10, workspace=6)
    (small,) = b.add("reduce", 1.0, [early], 1)
    (out,) = b.add("add", 1.0, [late, small], 1)
    graph = b.build([out])
    assert fastest(graph, 22, 1, staged=False) == 9.0
    assert fastest(graph, 22, 1) == 14.0
    report = rk_checkmate(graph, 22, 1, LIMITS)[1]
    assert report is not None
    assert report.objective_s == 14.0
