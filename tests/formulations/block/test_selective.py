"""Selective recomputation: legal anywhere, within budgets, near the optimum where that is known, fast when large."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.block.fixed import keep_all, recompute_all
from stowage.stages.formulations.block.greedy.selective import family, selective, selective_frontier
from stowage.stages.formulations.block.retention import retention
from stowage.stages.formulations.block.staged_order import StagedGraph, schedule_of
from stowage.stages.ir.block import BlockGraph
from stowage.stages.simulate.block import replay_block
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.block.brute import fastest
from tests.formulations.block.budgets import blocks_and_budgets, checked, peak_of, total_s
from tests.matrix import examples
from tests.strategies import attention_block, deep_chain, mlp_block


@settings(max_examples=examples(100), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(blocks_and_budgets())
def test_legal_within_budgets_and_never_better_than_the_optimum(case: tuple[BlockGraph, int, int]) -> None:
    graph, peak, save = case
    schedule, report = selective(graph, peak, save)
    if schedule is None or report is None:
        return
    cost = checked(graph, schedule, peak, save)
    assert abs(total_s(cost) - report.objective_s) < 1e-9
    best = fastest(graph, peak, save)
    assert best is not None
    assert report.bound_s - 1e-9 <= best <= report.objective_s + 1e-9


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(blocks_and_budgets(max_forward=8))
def test_every_candidate_is_legal_and_costed_right(case: tuple[BlockGraph, int, int]) -> None:
    graph = case[0]
    staged = StagedGraph.of(graph)
    for candidate in family(staged):
        referee = replay_block(graph, schedule_of(staged, candidate.line))
        assert abs(total_s(referee) - candidate.cost.time_s) < 1e-9
        assert referee.save_bytes == candidate.cost.save_bytes
        assert referee.forward_peak_bytes == candidate.cost.forward_peak_bytes
        assert referee.backward_peak_bytes == candidate.cost.backward_peak_bytes


@pytest.mark.parametrize("block", [attention_block, mlp_block])
def test_near_the_optimum_on_realistic_blocks(block: object) -> None:
    graph: BlockGraph = block()  # type: ignore[operator]
    plain = replay_block(graph, keep_all(graph))
    for share in (0.9, 0.6, 0.3):
        save = int(plain.save_bytes * share)
        exact = retention(graph, peak_of(plain), save, SolverSettings(time_limit_s=20.0))[1]
        greedy = selective(graph, peak_of(plain), save)[1]
        assert exact is not None
        assert greedy is not None
        assert greedy.objective_s <= exact.objective_s * 1.05


def test_a_whole_model_in_one_block_goes_far_down() -> None:
    graph = deep_chain(40)
    plain = replay_block(graph, keep_all(graph))
    frontier = [replay_block(graph, schedule) for schedule, _ in selective_frontier(graph)]
    # √n checkpointing of 40 equal layers: a fifth of the peak for less than one more forward.
    lean = [cost for cost in frontier if peak_of(cost) <= 0.2 * peak_of(plain)]
    assert lean
    assert min(total_s(cost) for cost in lean) <= total_s(plain) + 1.02 * plain.forward_time_s
    assert max(cost.recomputed_bytes for cost in frontier) >= 0.8 * plain.save_bytes
    # Recomputing the whole block at once saves nothing at the peak: hence the segments.
    assert peak_of(replay_block(graph, recompute_all(graph))) >= peak_of(plain)
    times = [total_s(cost) for cost in frontier]
    assert times == sorted(times)
    assert len(frontier) >= 12


def test_four_times_the_nodes_take_less_than_four_squared_times_as_long() -> None:
    taken: list[float] = []
    for layers, repeats in ((36, 5), (143, 2)):
        graph = deep_chain(layers)
        plain = replay_block(graph, keep_all(graph))
        times: list[float] = []
        for _ in range(repeats):  # the least: whatever else runs here makes some longer
            started = time.process_time()
            schedule, report = selective(graph, peak_of(plain) // 3, plain.save_bytes)
            times.append(time.process_time() - started)
        taken.append(min(times))
    assert len(graph.nodes) > 2000
    assert taken[1] < 14 * taken[0]
    assert schedule is not None
    assert report is not None
    checked(graph, schedule, peak_of(plain) // 3, plain.save_bytes)


def test_equal_inputs_give_an_equal_frontier() -> None:
    assert selective_frontier(deep_chain(6), 6) == selective_frontier(deep_chain(6), 6)


def test_keep_all_is_on_the_frontier() -> None:
    graph = attention_block()
    assert selective_frontier(graph)[0][0] == keep_all(graph)
