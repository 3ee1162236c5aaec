"""Rounding a relaxation choice by choice: a legal answer, and a bound that is below the optimum."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from stowage.stages.solver.milp import Choice, highs_available, pulp, solve_milp
from stowage.stages.solver.outcome import SolverSettings

pytestmark = pytest.mark.skipif(not highs_available(), reason="highspy is not installed")


def chain(seed: int, places: int, options: int, equal: bool) -> tuple[Any, list[Choice], float]:
    """A choice at each place, of options that take time or memory, within a budget; and its optimum."""
    draws = random.Random(seed)
    kinds = [0 if equal else i for i in range(places)]
    of = {kind: [(draws.randint(1, 9), draws.randint(1, 9)) for _ in range(options)] for kind in dict.fromkeys(kinds)}
    budget = sum(min(m for _, m in of[k]) for k in kinds) + draws.randint(0, 3 * places)
    problem = pulp.LpProblem("chain", pulp.LpMinimize)
    x = [[pulp.LpVariable(f"x_{i}_{o}", cat=pulp.LpBinary) for o in range(options)] for i in range(places)]
    problem += pulp.lpSum(of[k][o][0] * v for k, own in zip(kinds, x, strict=True) for o, v in enumerate(own))
    problem += pulp.lpSum(of[k][o][1] * v for k, own in zip(kinds, x, strict=True) for o, v in enumerate(own)) <= budget
    for own in x:
        problem += pulp.lpSum(own) == 1
    whole = (
        sum(of[k][o][0] for k, o in zip(kinds, chosen, strict=True))
        for chosen in itertools.product(range(options), repeat=places)
        if sum(of[k][o][1] for k, o in zip(kinds, chosen, strict=True)) <= budget
    )
    return problem, [Choice(own, kind) for own, kind in zip(x, kinds, strict=True)], float(min(whole))


@pytest.mark.parametrize("equal", [True, False])
def test_small_chains(equal: bool) -> None:
    within = 0
    for seed in range(12):
        problem, choices, optimum = chain(seed, 6, 3, equal)
        outcome = solve_milp(problem, SolverSettings(time_limit_s=10.0, gap=1e-3), choices=choices)
        assert outcome.bound <= optimum + 1e-6
        if not outcome.found:
            continue
        assert outcome.objective >= optimum - 1e-6
        for choice in choices:
            assert sorted(v.varValue for v in choice.variables)[-2:] == [0, 1]
        assert pulp.value(problem.objective) == pytest.approx(outcome.objective)
        assert all(constraint.valid(1e-6) for constraint in problem.constraints.values())
        within += outcome.objective <= 1.1 * optimum
    assert within >= 8


def test_equal_blocks_share_what_one_alone_would_round_away() -> None:
    """Of twenty equal blocks the relaxation gives each a twentieth of the option that one of them has to take."""
    problem = pulp.LpProblem("equal", pulp.LpMinimize)
    x = [[pulp.LpVariable(f"x_{i}_{o}", cat=pulp.LpBinary) for o in range(2)] for i in range(20)]
    problem += pulp.lpSum(own[0] + 2 * own[1] for own in x)  # the second is slower,
    problem += pulp.lpSum(own[0] for own in x) <= 19  # and one has to have it
    for own in x:
        problem += pulp.lpSum(own) == 1
    outcome = solve_milp(problem, SolverSettings(time_limit_s=10.0, gap=1e-6), choices=[Choice(own, 0) for own in x])
    assert (outcome.status, outcome.objective) == ("optimal", pytest.approx(21.0))


def test_what_has_no_answer() -> None:
    x = [pulp.LpVariable(f"x_{o}", cat=pulp.LpBinary) for o in range(2)]
    problem = pulp.LpProblem("none", pulp.LpMinimize)
    problem += pulp.lpSum(x)
    problem += pulp.lpSum(x) == 1
    problem += x[0] + x[1] >= 2
    assert not solve_milp(problem, SolverSettings(time_limit_s=10.0), choices=[Choice(x, 0)]).found
