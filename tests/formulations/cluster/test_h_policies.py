"""Policies and the greedy on H-Graphs: legal, within budgets, and as good as what they stand for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.cluster.policies import (
    chen,
    fastest_options,
    greedy,
    keep_all,
    policy_schedules,
    recompute_all,
)
from stowage.stages.formulations.cluster.problem import HProblem, distinct_steps, flat
from stowage.stages.formulations.cluster.staged_order import schedule_of
from stowage.stages.ir.h_graph import HGraph, HStep
from stowage.stages.simulate.h_graph import replay_h_graph
from tests.formulations.cluster.h_brute import fastest_h
from tests.formulations.cluster.h_graphs import checked_h, h_graphs_and_budgets, layered, small_h_graphs
from tests.matrix import examples
from tests.strategies import attention_block, deep_chain


@settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(small_h_graphs())
def test_policies_are_legal_and_cost_what_they_say(graph: HGraph) -> None:
    data = HProblem(graph)
    for policy in (keep_all(data), recompute_all(data), chen(data)):
        cost = replay_h_graph(graph, schedule_of(data, policy.events))
        assert cost.peak_bytes == policy.cost.peak_bytes
        assert cost.save_bytes == policy.cost.save_bytes
        assert abs(cost.time_s - policy.cost.time_s) < 1e-9
        assert cost.time_s >= data.floor_s - 1e-9
    assert recompute_all(data).cost.save_bytes <= keep_all(data).cost.save_bytes
    assert abs(keep_all(data).cost.time_s - data.floor_s) < 1e-9


@settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(h_graphs_and_budgets())
def test_greedy_keeps_within_budgets_and_is_no_better_than_the_best(case: tuple[HGraph, int, int]) -> None:
    graph, peak, save = case
    answer, best = greedy(graph, peak, save), fastest_h(graph, peak, save)
    if answer is not None and answer.schedule is not None:
        assert best is not None
        assert checked_h(graph, answer.schedule, peak, save).time_s >= best - 1e-9


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.4])
def test_greedy_beats_the_fixed_policies(share: float) -> None:
    graph = layered(16, 6)
    costs = {name: replay_h_graph(graph, schedule) for name, schedule in policy_schedules(graph).items()}
    budget = int(costs["keep_all"].peak_bytes * share)
    answer = greedy(graph, budget, budget)
    assert answer is not None
    assert answer.schedule is not None
    cost = checked_h(graph, answer.schedule, budget, budget)
    fitting = [c.time_s for c in costs.values() if c.peak_bytes <= budget]
    assert all(cost.time_s <= time_s for time_s in fitting)
    # Half of the activations for less than a forward: what recomputing everything costs.
    assert cost.time_s < costs["recompute_all"].time_s


def test_flat_blocks_have_their_policies_too() -> None:
    for block in (attention_block(), deep_chain(3)):
        graph = flat(block)
        graph.check()
        costs = {name: replay_h_graph(graph, schedule) for name, schedule in policy_schedules(graph).items()}
        assert costs["recompute_all"].save_bytes < costs["chen"].save_bytes <= costs["keep_all"].save_bytes
        assert costs["keep_all"].time_s < costs["recompute_all"].time_s


def test_the_fastest_option_is_the_first_of_a_front() -> None:
    assert fastest_options(HProblem(layered(4, 3))) == (0, 0, 0, 0)


def test_steps_that_another_covers_are_left_out() -> None:
    small, large = HStep(1, unborn=(0,)), HStep(2)
    assert distinct_steps((small, large)) == (large,)
    assert distinct_steps((large, HStep(2), HStep(3, unborn=(0,)))) == (large, HStep(3, unborn=(0,)))
    kept = HStep(1, phantom_released_bytes=5)
    assert distinct_steps((large, kept)) == (large, kept)
