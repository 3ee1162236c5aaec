"""Lets Elixir's greedy choice, the exact one and the fixed policies compete; a referee times them and decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.formulations.sharding.elixir.on_fsdp2 import greedy_choices
from stowage.stages.formulations.sharding.fixed import fixed_policies
from stowage.stages.formulations.sharding.four_states.solve import exact_choice
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.solver.outcome import SolverSettings


@dataclass(frozen=True)
class Judged:
    """What the referee says of a choice: its time, and the bytes on a device and in the host."""

    time_s: float
    device_bytes: int
    host_bytes: int


Judge = Callable[[Sequence[GroupChoice]], Judged]


@dataclass(frozen=True)
class Contestant:
    """A choice that took part.

    Attributes:
        name: "exact" (the solver's answer, or what it began with), "greedy", or a fixed policy.
        choices: a choice for every group.
        judged: the referee's words.
        fits: both budgets suffice.
    """

    name: str
    choices: tuple[GroupChoice, ...]
    judged: Judged
    fits: bool


@dataclass(frozen=True)
class RaceResult:
    """The result of a race.

    Attributes:
        best: the fastest choice that fits, None if none does.
        contestants: all that took part, the fastest that fits first.
        bound_s: no choice within the budgets is faster, as far as the exact model has proven it.
        exact_s: seconds that the exact choice took.
    """

    best: Contestant | None
    contestants: tuple[Contestant, ...]
    bound_s: float
    exact_s: float


def race(problem: ShardingProblem, judge: Judge, settings: SolverSettings) -> RaceResult:
    """Return the best choice for a problem.

    Args:
        problem: groups, machine and budgets.
        judge: the referee, on the same groups and machine.
        settings: limits of the solver.
    """
    entered = dict(fixed_policies(problem))
    greedy = greedy_choices(problem)
    if greedy is not None:
        entered["greedy"] = greedy
    before = _in_order(problem, judge, entered)[0]
    exact = exact_choice(problem, settings, start=before.choices if before.fits else None)
    # The solver counts with tolerances, and may run out of time: what it began with is its answer too.
    answers = [c for c in (exact.choices, before.choices if before.fits else None) if c is not None]
    if answers:
        entered["exact"] = _in_order(problem, judge, {str(k): c for k, c in enumerate(answers)})[0].choices
    order = _in_order(problem, judge, entered)
    best = order[0] if order[0].fits else None
    return RaceResult(best, tuple(order), exact.bound_s, exact.wall_s)


def _in_order(
    problem: ShardingProblem, judge: Judge, entered: Mapping[str, tuple[GroupChoice, ...]]
) -> list[Contestant]:
    """Judge all, and put those that fit first, the fastest before the others; at equal times the later one."""
    found = []
    for name, choices in reversed(list(entered.items())):
        judged = judge(choices)
        fits = judged.device_bytes <= problem.device_budget and judged.host_bytes <= problem.host_budget
        found.append(Contestant(name, choices, judged, fits))
    return sorted(found, key=lambda c: (not c.fits, c.judged.time_s))
