"""The exact choice against every choice there is, timed by the simulator, which shares no code with it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.flows.planning.sharding import judge, plan_groups
from stowage.stages.formulations.sharding.cost_model import CostModel
from stowage.stages.formulations.sharding.elixir.on_fsdp2 import greedy_choices
from stowage.stages.formulations.sharding.four_states.equations import EQUATIONS, build
from stowage.stages.formulations.sharding.four_states.memory_rows import row_of
from stowage.stages.formulations.sharding.four_states.model import FourStates
from stowage.stages.formulations.sharding.four_states.solve import exact_choice
from stowage.stages.formulations.sharding.four_states.start import begin_with
from stowage.stages.formulations.sharding.memory import State
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import ParallelMachine
from stowage.stages.solver.equations import constraint_prefix
from stowage.stages.solver.outcome import SolverSettings
from tests.matrix import examples
from tests.sharding_problems import every_choice, groups, problems

EXACT = SolverSettings(time_limit_s=60.0, gap=0.0)


@given(problem=problems())
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_the_cost_model_counts_the_bytes_that_the_simulator_counts(problem: ShardingProblem) -> None:
    costs = CostModel(problem)
    for choices in every_choice(problem):
        judged = judge(problem, choices)
        assert costs.device_bytes(choices) == judged.device_bytes
        assert costs.host_total(choices) == judged.host_bytes


@given(problem=problems(most=3), share=st.floats(0, 1), host_share=st.sampled_from([0.5, 1.0]))
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_it_is_the_fastest_of_all_choices_and_knows_its_time(
    problem: ShardingProblem, share: float, host_share: float
) -> None:
    judged = [judge(problem, choices) for choices in every_choice(problem)]
    least, most = min(j.device_bytes for j in judged), max(j.device_bytes for j in judged)
    budget = int(least + share * (most - least))
    problem = replace(problem, device_budget=budget, host_budget=int(host_share * max(j.host_bytes for j in judged)))
    fitting = [
        j.time_s for j in judged if j.device_bytes <= problem.device_budget and j.host_bytes <= problem.host_budget
    ]
    answer = exact_choice(problem, EXACT)
    if not fitting:
        assert answer.status == "infeasible"
        return
    assert answer.choices is not None
    assert answer.time_s == pytest.approx(min(fitting), rel=1e-6)
    assert judge(problem, answer.choices).time_s == pytest.approx(min(fitting), rel=1e-6)
    assert answer.bound_s <= min(fitting) * (1 + 1e-6)


@given(
    problem=problems(most=3, largest=40_000_000),
    moment=st.integers(0, 99),
    less=st.sampled_from([0, 1, 8, 100]),
    host=st.sampled_from([0, 10**6, 10**12]),
)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_budgets_count_to_the_byte_where_groups_are_tiny_beside_others(
    problem: ShardingProblem, moment: int, less: int, host: int
) -> None:
    """A solver's tolerance is a few bytes of a million, and as much as a small group takes."""
    judged = [judge(problem, choices) for choices in every_choice(problem)]
    peaks = sorted({j.device_bytes for j in judged})
    budget = max(peaks[moment % len(peaks)] - less, 1)
    problem = replace(problem, device_budget=budget, host_budget=host)
    fitting = [j.time_s for j in judged if j.device_bytes <= budget and j.host_bytes <= host]
    answer = exact_choice(problem, EXACT)
    if not fitting:
        assert answer.status == "infeasible"
        return
    assert answer.choices is not None
    found = judge(problem, answer.choices)
    assert found.device_bytes <= budget
    assert found.host_bytes <= host
    assert found.time_s == pytest.approx(min(fitting), rel=1e-5)
    assert answer.bound_s <= min(fitting) * (1 + 1e-5)


@given(problem=problems(), share=st.floats(0, 1))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_rows_of_memory_allow_what_fits_and_covers_forbid_what_does_not(problem: ShardingProblem, share: float) -> None:
    costs = CostModel(problem)
    peaks = [costs.device_bytes(choices) for choices in every_choice(problem)]
    budget = int(min(peaks) + share * (max(peaks) - min(peaks)))
    rows = [row_of(moment, problem, budget) for moment in costs.moments]
    every = [[State(c.on_host, c.keep) for c in choices] for choices in every_choice(problem)]
    for chosen, peak in zip(every, peaks, strict=True):
        covers = [states for row in rows if (states := row.cover(chosen))]
        assert bool(covers) == (peak > budget) or any(row.limit < 0 for row in rows)
        for states in covers:
            met = [all(any((i, other[i]) in own for i in range(len(other))) for own in states) for other in every]
            assert not any(peak <= budget for peak, all_met in zip(peaks, met, strict=True) if all_met)


@given(problem=problems(most=3), share=st.floats(0, 1))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_no_contestant_is_faster_than_the_best(problem: ShardingProblem, share: float) -> None:
    judged = [judge(problem, choices) for choices in every_choice(problem)]
    least, most = min(j.device_bytes for j in judged), max(j.device_bytes for j in judged)
    result = plan_groups(replace(problem, device_budget=int(least + share * (most - least))), EXACT)
    assert result.best is not None
    fitting = [c for c in result.contestants if c.fits]
    assert {"exact"} <= {c.name for c in fitting}
    assert all(result.best.judged.time_s <= c.judged.time_s for c in fitting)
    exact = next(c for c in fitting if c.name == "exact")
    assert exact.judged.time_s <= result.best.judged.time_s * (1 + 1e-6)
    assert result.bound_s <= result.best.judged.time_s * (1 + 1e-6)


@given(
    problem=problems(),
    share=st.floats(0, 1),
    host_share=st.sampled_from([0.3, 1.0]),
    limits=st.sampled_from([EXACT, SolverSettings(time_limit_s=0.0), SolverSettings(time_limit_s=60.0, gap=0.5)]),
)
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_the_exact_choice_is_never_above_the_greedy_one_and_the_policies(
    problem: ShardingProblem, share: float, host_share: float, limits: SolverSettings
) -> None:
    """However little the solver has found: what it began with is its answer then."""
    judged = [judge(problem, choices) for choices in every_choice(problem)]
    least, most = min(j.device_bytes for j in judged), max(j.device_bytes for j in judged)
    host_budget = int(host_share * max(j.host_bytes for j in judged))
    problem = replace(problem, device_budget=int(least + share * (most - least)), host_budget=host_budget)
    contestants = {c.name: c for c in plan_groups(problem, limits).contestants}
    assert {"ZeRO-2", "ZeRO-3", "ZeRO-2 offloaded", "ZeRO-3 offloaded"} <= set(contestants)
    fitting = [c for c in contestants.values() if c.fits]
    if fitting:
        exact = contestants["exact"]
        assert exact.fits
        assert exact.judged.time_s == min(c.judged.time_s for c in fitting)
    greedy = greedy_choices(problem)
    assert (greedy is not None) == ("greedy" in contestants)


@given(problem=problems(most=3), host_budget=st.sampled_from([10**9, 4000]))
@settings(max_examples=examples(30), deadline=None, derandomize=True)
def test_updates_beside_computing_are_in_the_end_of_the_step(problem: ShardingProblem, host_budget: int) -> None:
    problem = replace(problem, micro_batches=1, host_budget=host_budget, host_updates_beside=True)
    costs = CostModel(problem)
    answer = exact_choice(problem, EXACT)
    best = math.inf
    for choices in every_choice(problem):
        m = build(FourStates(problem))
        end = begin_with(m, choices) * m.time_unit
        states = [State(c.on_host, c.keep) for c in choices]
        host_s = sum(costs.update_s(i, s) for i, s in enumerate(states) if s.on_host)
        device_s = sum(costs.update_s(i, s) for i, s in enumerate(states) if not s.on_host)
        waiting = replace(problem, host_updates_beside=False)
        assert end == pytest.approx(max(host_s, judge(waiting, choices).time_s - host_s - device_s))
        if costs.host_total(choices) <= host_budget:
            best = min(best, end + device_s)
    assert answer.time_s == pytest.approx(best, rel=1e-6)


@given(problem=problems(most=3))
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_choices_to_begin_with_keep_every_row_and_have_their_time(problem: ShardingProblem) -> None:
    for choices in every_choice(problem):
        m = build(FourStates(problem))
        begin_with(m, choices)
        assert all(row.valid(1e-6) for row in m.model.constraints.values())
        assert m.model.objective.value() * m.time_unit == pytest.approx(judge(problem, choices).time_s)


@given(found=groups())
@settings(max_examples=5, deadline=None, derandomize=True)
def test_every_row_belongs_to_an_equation(found: tuple[object, ...]) -> None:
    machine = ParallelMachine("two", 2, 10**6, 10**6, 1e6, 1e-4, 1e6, 1e6, 2e6, 1e6, 1e5)
    problem = ShardingProblem(found, machine, 10**9, 1, micro_batches=2)  # type: ignore[arg-type]
    peaks = [CostModel(problem).device_bytes(choices) for choices in every_choice(problem)]
    problem = replace(problem, device_budget=(min(peaks) + max(peaks)) // 2)  # a row that cannot bind is left out
    model = build(FourStates(problem))
    prefixes = tuple(constraint_prefix(name) for name in EQUATIONS)
    assert all(name.startswith(prefixes) for name in model.model.constraints)
    assert {p for p in prefixes if any(name.startswith(p) for name in model.model.constraints)} == set(prefixes)
