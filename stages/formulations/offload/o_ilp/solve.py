"""Solves O-ILP (thesis 4.5); the model is in `model.py`, its rows in `equations.py`, answers in `answers.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from stowage.stages.formulations.offload.o_ilp.answers import OIlpAnswer, answer_of, bound_of, value_of
from stowage.stages.formulations.offload.o_ilp.equations import build
from stowage.stages.formulations.offload.o_ilp.model import OIlp, OIlpLimits
from stowage.stages.formulations.offload.problem import OffloadOption, OffloadProblem
from stowage.stages.solver.milp import Choice, MilpSolver, highs_available, pulp, solve_milp
from stowage.stages.solver.outcome import SolverOutcome, SolverSettings, Status

Method = Literal["exact", "relax_and_round"]

TOLERANCE = 1e-6
"""Relative distance of an optimum from its bound that comes of how solvers count."""

INTEGERS_S = 1e-3
"""Seconds for each variable that a program with integers takes: with a limit below that, relaxations come first."""

LINEAR_S, PATIENCE = 2e-3, 4.0
"""Seconds for each variable that a program without integers may take, up to so many times the limit.

It takes less on the machines tried, and where it is cut off nothing is known.
"""

NEAR_RELAXATION = 0.05
"""Share by which what relaxations found may be above the bound, where the limit is short for integers."""

SMALL_GAP = 5e-3
"""Gap below which relaxations come first too: of a program with integers the last tenths of a percent take longest."""

UNUSED = 1e-6
"""Share up to which a relaxation does not use an option."""


def o_ilp(
    problem: OffloadProblem,
    settings: SolverSettings,
    *,
    method: Method = "exact",
    solver: MilpSolver = "highs",
    limits: OIlpLimits | None = None,
) -> OIlpAnswer:
    """Find the fastest fractional plan within the budget.

    Args:
        problem: the problem, for a batch of 1 where `limits.batch` is given.
        settings: limits of the solver.
        method: "exact" is the MILP. "relax_and_round" solves its relaxation, which gives the bound, rounds the options
            within the memory that the relaxation gives to activations, and solves the rest again.
        solver: "highs" or "cbc".
        limits: what may be decided; everything by default.
    """
    limits = limits or OIlpLimits()
    answer = _Solve(problem, settings, solver, limits).answer(integers=method == "exact")
    if answer.status == "infeasible":
        smallest, wall_s = smallest_budget(problem, settings, solver=solver, limits=limits)
        answer = replace(answer, smallest_budget_bytes=smallest, wall_s=answer.wall_s + wall_s)
    return answer


def smallest_budget(
    problem: OffloadProblem,
    settings: SolverSettings,
    *,
    solver: MilpSolver = "highs",
    limits: OIlpLimits | None = None,
) -> tuple[int | None, float]:
    """Find the smallest device budget for which there is a solution, however slow, and the seconds that takes."""
    free = replace(limits or OIlpLimits(), device_free=True, batch=None)
    m, wall_s, start = build(problem, free), 0.0, dict[str, float]()
    if m.model.isMIP() and free.options is None:
        lean = build(problem, replace(free, options=_leanest(problem), relaxed=True))
        leanest = solve_milp(lean.model, settings, solver=solver)
        wall_s, start = leanest.wall_s, _values(lean) if leanest.found else {}
    outcome = _solve(m, settings, solver, start)
    wall_s += outcome.wall_s
    if not outcome.found:
        return None, wall_s
    # Add a little to what the solver says, since its rows hold within 1e-6 of a unit.
    smallest = outcome.objective * m.memory_unit
    return math.ceil(smallest + 4e-6 * m.memory_unit - 1e-4), wall_s


class _Solve:
    """Solves O-ILP in steps, each of which may end within the gap.

    1. The whole program, from the leanest options. Its answers lie in a corner, and are the easiest to make whole.
    2. The linear relaxation by interior points, whose optimum is a bound; the first step may not come as far in time,
       since the simplex method takes several times as long with programs as long and sparse as these.
    3. The relaxation's options, rounded to whole ones, and all fractions anew: nearly always within 1%.
    4. The program with only those options that the relaxation or the best answer uses.

    Where a small gap is asked for, the relaxation is rounded block by block too, see `solver.highs_rounding`, before
    integers.

    Where a program is so large, by its number of variables, that the limit is short for it, its relaxation comes first,
    and integers are only asked where the rounded relaxation is far from its bound. With 7,400 variables and 4 s, the
    whole program stayed twice at what it began with (within 4.8% of the bound, and far from it), and came within 0.15%
    where rounding came within 22%. Where a small gap is asked for, relaxations come first too, and integers last.
    """

    def __init__(
        self, problem: OffloadProblem, settings: SolverSettings, solver: MilpSolver, limits: OIlpLimits
    ) -> None:
        self._problem, self._settings, self._solver, self._limits = problem, settings, solver, limits
        self._best = OIlpAnswer("unknown", None, 0.0, None, "", 0.0)
        self._start: dict[str, float] = {}
        self._objective, self._bound = math.inf, -math.inf  # of the programs, in their unit
        self._spent_s = 0.0
        self._linear: OIlp | None = None

    def answer(self, *, integers: bool) -> OIlpAnswer:
        """Return the best answer found.

        Args:
            integers: solve programs with integers; else only round the relaxation.
        """
        linear = self._limits.relaxed or self._limits.options is not None
        whole = None if linear or not integers else self._integers()
        mixed = whole is not None and whole.model.isMIP()
        short = whole is not None and mixed and self._is_short(whole)
        late = short or (mixed and self._settings.gap < SMALL_GAP)  # integers come after relaxations
        rounds = late and not short and self._rounds()
        if whole is not None and not late:
            status = self._whole(whole)
            if status in ("infeasible", "optimal"):
                return self._result(status)
        relaxed = self._relaxed()
        status = self._try(relaxed, whole=True, answers=linear)
        if status == "infeasible" or linear:
            return self._result(status)
        shares = [[value_of(v) for v in comp] for comp in relaxed.comp]
        if status != "unknown":
            self._near(shares, most=1 if rounds else None)
        if whole is not None and short and status == "unknown":
            self._try(self._lean(), whole=False)  # with integers it would take longer still
        elif whole is not None and late and not (self._distance() <= NEAR_RELAXATION if short else self._is_good()):
            if rounds and self._by_choices(whole):
                return self._result("optimal")
            status = self._whole(whole)
            if status == "infeasible":
                return self._result(status)
        elif status != "unknown" and whole is not None and not late and not self._is_good():
            self._try(self._integers(shares), whole=False, interior_points=True)
        if self._best.solution is None:
            return self._result("unknown")
        return self._result("optimal" if self._is_good() else "feasible")

    def _is_short(self, m: OIlp) -> bool:
        """Return whether the limit is short for a program with integers."""
        return self._settings.time_limit_s < INTEGERS_S * len(m.model.variables())

    def _whole(self, whole: OIlp) -> Status:
        """Solve the whole program, with integers from the leanest options or from what is known by now."""
        if whole.model.isMIP() and self._best.solution is None:
            self._try(self._lean(), whole=False)
        return self._try(whole, whole=True)

    def _rounds(self) -> bool:
        """Return whether a relaxation can be rounded block by block: options alone are integers, and HiGHS is there."""
        return self._solver == "highs" and highs_available() and self._limits.batch is None

    def _by_choices(self, whole: OIlp) -> bool:
        """Round the relaxation block by block, and return whether that ends within the gap."""
        kinds = {block: kind for kind, block in enumerate(self._problem.blocks)}
        choices = [Choice(comp, kinds[b]) for comp, b in zip(whole.comp, self._problem.blocks)]
        self._try(whole, whole=True, choices=choices)
        return self._is_good()

    def _near(self, shares: Sequence[Sequence[float]], most: int | None = None) -> None:
        """Look for answers near the relaxation's, given its shares of options: the first so many."""
        for options in list(dict.fromkeys(_roundings(self._problem, shares)))[:most]:
            if not self._is_good():
                self._round(options)

    def _relaxed(self, options: Sequence[int] | None = None) -> OIlp:
        """Return the relaxation, with the options of blocks where they are given; it is built once.

        Where `limits` has options, rows of the program fix them.
        """
        if self._linear is None:
            self._linear = build(self._problem, replace(self._limits, relaxed=True))
        for i, comp in enumerate(self._linear.comp):
            for o, variable in enumerate(comp):
                variable.upBound = 1 if options is None or o == options[i] else 0
        return self._linear

    def _lean(self) -> OIlp:
        return self._relaxed(_leanest(self._problem))

    def _round(self, options: Sequence[int]) -> None:
        self._try(self._relaxed(options), whole=False)

    def _integers(self, shares: Sequence[Sequence[float]] = ()) -> OIlp:
        """Build the program with integers: with all options, or with those of the best answer and of the shares."""
        m = build(self._problem, self._limits)
        for i, (comp, share) in enumerate(zip(m.comp, shares)):
            for o, (variable, x) in enumerate(zip(comp, share)):
                if x <= UNUSED and (self._best.solution is None or self._best.solution.options[i] != o):
                    variable.upBound = 0
        return m

    def _try(
        self,
        m: OIlp,
        *,
        whole: bool,
        answers: bool = True,
        interior_points: bool = False,
        choices: Sequence[Choice] = (),
    ) -> Status:
        """Solve a program, and return how that ended.

        Args:
            m: the program.
            whole: nothing that the problem allows is left out, so that its bound is one of the problem.
            answers: what it finds is an answer of the problem.
            interior_points: see `solve_milp`.
            choices: see there.
        """
        linear = not m.model.isMIP()
        settings = self._settings
        if linear:
            limit_s = settings.time_limit_s
            patient_s = min(LINEAR_S * len(m.model.variables()), PATIENCE * limit_s)
            settings = replace(settings, time_limit_s=max(limit_s, patient_s))
        outcome = _solve(m, settings, self._solver, {} if linear else self._start, interior_points, choices)
        self._spent_s += outcome.wall_s
        found = answer_of(m, outcome, bound_of(m, outcome))
        bound_s = max(self._best.bound_s, found.bound_s) if whole else self._best.bound_s
        better = answers and outcome.found and outcome.objective < self._objective
        if better:
            self._start = _values(m)
            self._objective = outcome.objective
        if whole:
            proven = outcome.objective if linear and outcome.status == "optimal" else outcome.bound
            self._bound = max(self._bound, proven)
        self._best = replace(found if better else self._best, bound_s=bound_s, solver=outcome.solver)
        return outcome.status

    def _distance(self) -> float:
        """Return how far the best answer is above the bound, as a share of it; infinite where there is none."""
        found = self._objective - self._bound
        return found / abs(self._objective) if math.isfinite(found) and self._objective else math.inf

    def _is_good(self) -> bool:
        distance = self._objective - self._bound
        return math.isfinite(distance) and distance <= max(self._settings.gap, TOLERANCE) * abs(self._objective)

    def _result(self, status: Status) -> OIlpAnswer:
        """Return the best answer with what is known of it."""
        bound_s = math.inf if status == "infeasible" else min(self._best.bound_s, self._best.objective_s)
        return replace(self._best, status=status, bound_s=bound_s, wall_s=self._spent_s)


def _solve(
    m: OIlp,
    settings: SolverSettings,
    solver: MilpSolver,
    start: Mapping[str, float],
    interior_points: bool = False,
    choices: Sequence[Choice] = (),
) -> SolverOutcome:
    """Solve a program, from the values of an answer where one is known."""
    if start:
        for variable in m.model.variables():
            value = start.get(variable.name, 0.0)
            variable.setInitialValue(round(value) if variable.cat == pulp.LpInteger else value, check=False)
    return solve_milp(
        m.model, settings, solver=solver, warm_start=bool(start), interior_points=interior_points, choices=choices
    )


def _values(m: OIlp) -> dict[str, float]:
    return {variable.name: variable.varValue or 0.0 for variable in m.model.variables()}


def _roundings(problem: OffloadProblem, shares: Sequence[Sequence[float]]) -> Iterator[tuple[int, ...]]:
    """Yield whole options near fractional ones.

    What blocks keep follows the running sum of the relaxation, first to the nearest, then never above it; at last come
    the leanest options.
    """
    for above in (0.5, 0.0):
        carried, chosen = 0.0, []
        for block, share in zip(problem.blocks, shares):
            saved = [option.save_bytes for option in block.options]
            wanted = [o for o, x in enumerate(share) if x > 1e-4]
            least, most = min(saved[o] for o in wanted), max(saved[o] for o in wanted)
            carried += sum(x * s for x, s in zip(share, saved))
            limit = max(float(least), carried + above * (most - least) + 1.0)
            best = max((o for o in wanted if saved[o] <= limit), key=lambda o: (saved[o], share[o]))
            chosen.append(best)
            carried -= saved[best]
        yield tuple(chosen)
    yield _leanest(problem)


def _leanest(problem: OffloadProblem) -> tuple[int, ...]:
    """Return the option of each block that needs least memory while its backward runs."""

    def need(option: OffloadOption) -> int:
        return option.save_bytes + option.backward_peak_bytes

    return tuple(min(range(len(b.options)), key=lambda o: need(b.options[o])) for b in problem.blocks)
