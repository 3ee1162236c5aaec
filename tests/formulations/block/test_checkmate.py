"""Checkmate: optimal for values kept or freed as one, never better than RK-Checkmate, and every equation is there."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.checkmate import EQUATIONS, _warm_start, build, checkmate
from stowage.stages.formulations.block.rk_checkmate.solve import rk_checkmate
from stowage.stages.formulations.block.staged_order import StagedGraph, cost_of, run_once, timeline
from stowage.stages.ir.block import BlockAllocation, BlockGraph
from stowage.stages.solver.equations import constraint_prefix
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.block.brute import fastest
from tests.formulations.block.budgets import blocks_and_budgets, checked, total_s
from tests.matrix import examples
from tests.strategies import BlockBuilder

LIMITS = SolverSettings(time_limit_s=600.0)


def as_one(graph: BlockGraph) -> BlockGraph:
    """The block with one allocation per node, as large as all that the node creates: what Checkmate sees."""
    of = {a: k for k, node in enumerate(graph.nodes) for a in node.creates}
    makers = sorted(set(of.values()))
    number = {k: i for i, k in enumerate(makers)} | {("in", a): len(makers) + i for i, a in enumerate(graph.incoming)}
    value = {
        a: number[of[a]] if a in of else number["in", a]
        for a in range(len(graph.allocations))
        if a in of or a in graph.incoming
    }
    sizes = [0] * len(number)
    for a, i in value.items():
        sizes[i] += graph.allocations[a].nbytes

    def renamed(indices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({value[a] for a in indices}))

    return BlockGraph(
        tuple(
            type(n)(n.name, n.time_s, n.workspace_bytes, renamed(n.reads), renamed(n.creates), n.once)
            for n in graph.nodes
        ),
        graph.forward_count,
        tuple(BlockAllocation(f"v{i}", size) for i, size in enumerate(sizes)),
        renamed(graph.output),
        renamed(graph.incoming),
        renamed(graph.outgoing),
    )


@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets())
def test_equals_exhaustive_search_over_whole_values(case: tuple[BlockGraph, int, int]) -> None:
    graph, peak, save = case
    best = fastest(as_one(graph), peak, save)
    schedule, report = checkmate(graph, peak, save, LIMITS)
    if best is None:
        assert schedule is None
        assert report is None
        return
    assert schedule is not None
    assert report is not None
    assert report.status == "optimal"
    assert abs(total_s(checked(graph, schedule, peak, save)) - best) < 1e-6
    assert abs(report.objective_s - best) < 1e-6


@settings(max_examples=examples(8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets())
def test_never_better_than_rk_checkmate(case: tuple[BlockGraph, int, int]) -> None:
    graph, peak, save = case
    plain = checkmate(graph, peak, save, LIMITS)[1]
    refined = rk_checkmate(graph, peak, save, LIMITS)[1]
    if plain is None:
        return
    assert refined is not None
    assert refined.objective_s <= plain.objective_s + 1e-6
    if as_one(graph) == graph:
        assert abs(refined.objective_s - plain.objective_s) < 1e-6


def test_a_value_is_kept_or_freed_as_one() -> None:
    """Backward needs the 8 bytes that f0 leaves for it, and not the 4 that it returns: RK-Checkmate parts them."""
    b = BlockBuilder()
    x, phantom = b.add("f0", 1.0, [], 4, 8)
    (y,) = b.add("f1", 2.0, [x], 4)
    (g,) = b.loss([y])
    (g0,) = b.add("b0", 3.0, [g, phantom], 4)
    graph = b.build([g0])
    for save, whole, parted in ((16, 6.0, 6.0), (15, 7.0, 6.0), (12, 7.0, 6.0), (11, 7.0, 7.0), (4, 7.0, 7.0)):
        ours, refined = checkmate(graph, 24, save, LIMITS)[1], rk_checkmate(graph, 24, save, LIMITS)[1]
        assert ours is not None
        assert refined is not None
        assert (ours.objective_s, refined.objective_s) == (whole, parted)
    assert checkmate(graph, 11, 16, LIMITS) == (None, None)


@settings(max_examples=examples(6), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets(max_forward=2))
def test_cbc_and_warm_starts_give_the_same_optimum(case: tuple[BlockGraph, int, int]) -> None:
    graph, peak, save = case
    best = fastest(as_one(graph), peak, save)
    by_cbc = checkmate(graph, peak, save, LIMITS, solver="cbc")[1]
    started = checkmate(graph, peak, save, LIMITS, hint=run_once(StagedGraph.of(graph)))[1]
    for report in (by_cbc, started):
        assert (report is None) == (best is None)
        assert report is None or best is None or abs(report.objective_s - best) < 1e-6


@settings(max_examples=examples(20), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets())
def test_a_warm_start_satisfies_every_equation(case: tuple[BlockGraph, int, int]) -> None:
    graph = as_one(case[0])
    staged = StagedGraph.of(graph)
    again = run_once(staged)
    # Besides each node once, its first forward node again for the first backward one.
    if not staged.nodes[0].once and staged.loss + 1 < len(staged.nodes):
        again[0].append(staged.loss + 1)
    for executions in (run_once(staged), again):
        cost = cost_of(staged, timeline(staged, executions))
        model = build(graph, cost.peak_bytes + 50, cost.save_bytes + 50)
        _warm_start(model, executions)
        for name, constraint in model.problem.constraints.items():
            value = constraint.constant + sum(c * v.varValue for v, c in constraint.items())
            legal = (
                value <= 1e-9
                if constraint.sense == -1
                else value >= -1e-9
                if constraint.sense == 1
                else abs(value) < 1e-9
            )
            assert legal, name
        assert model.problem.objective.value() == sum(staged.nodes[k].time_s * len(s) for k, s in executions.items())


def test_a_once_node_is_never_made_again() -> None:
    b = BlockBuilder()
    (x,) = b.add("f0", 1.0, [], 8, once=True)
    (y,) = b.add("f1", 1.0, [x], 2)
    (g,) = b.loss([y])
    (gx,) = b.add("b0", 1.0, [g, x], 2)
    graph = b.build([gx])
    assert checkmate(graph, 100, 2, LIMITS) == (None, None)
    assert checkmate(graph, 100, 10, LIMITS)[0] is not None


def test_every_equation_is_in_the_model() -> None:
    assert [n for n in EQUATIONS if "." in n] == [f"C.{n}" for n in range(1, 11)]
    b = BlockBuilder()
    (x,) = b.add("f0", 1.0, [], 8)
    (y,) = b.add("f1", 1.0, [x], 2)
    (g,) = b.loss([y])
    (gx,) = b.add("b0", 1.0, [g, x], 2)
    model = build(b.build([gx]), 20, 12)
    prefixes = {number: constraint_prefix(number) for number in EQUATIONS}
    names = list(model.problem.constraints)
    for number, prefix in prefixes.items():
        assert any(re.fullmatch(rf"{prefix}(_.*)?", name) for name in names), number
        assert EQUATIONS[number].__doc__
        assert EQUATIONS[number].__name__ == prefix
    for name in names:
        owners = [p for p in prefixes.values() if name == p or name.startswith(p + "_")]
        assert len(owners) == 1, name
    text = str(model.problem)
    for expected in ("eq_c_3:", "eq_c_9_", "eq_c_10_3_3:", "once_2:", "save:"):
        assert expected in text
