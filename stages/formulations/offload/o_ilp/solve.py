"""Solves O-ILP (thesis 4.5) and reads its fractions; the model is in `model.py`, its rows in `equations.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from stowage.stages.formulations.offload.o_ilp.equations import TRANSFER_COST, build
from stowage.stages.formulations.offload.o_ilp.model import OIlp, OIlpLimits
from stowage.stages.formulations.offload.o_ilp.quantities import Moving, Portion
from stowage.stages.formulations.offload.problem import OffloadOption, OffloadProblem
from stowage.stages.solver.milp import MilpSolver, pulp, solve_milp
from stowage.stages.solver.outcome import SolverOutcome, SolverSettings, Status

Method = Literal["exact", "relax_and_round"]

_SNAP = 1e-6


@dataclass(frozen=True)
class Fractions:
    """The transfers and updates of one group, as fractions of it, one number per step.

    Attributes:
        stored, offloaded, reloaded: Sto, Ofl, Prf of its weights.
        gradients: fraction whose gradient is offloaded to be updated on the CPU.
        waiting: fraction whose gradient waits on the device for that.
        updated: Opt.
        states_stored, states_offloaded, states_reloaded: StoO, OflO, PrfO.
        on_cpu: X_w.
        on_disk: fraction placed on the disk behind the host.
    """

    stored: tuple[float, ...]
    offloaded: tuple[float, ...]
    reloaded: tuple[float, ...]
    gradients: tuple[float, ...]
    waiting: tuple[float, ...]
    updated: tuple[float, ...]
    states_stored: tuple[float, ...]
    states_offloaded: tuple[float, ...]
    states_reloaded: tuple[float, ...]
    on_cpu: float
    on_disk: float


@dataclass(frozen=True)
class OIlpSolution:
    """A fractional plan.

    Attributes:
        options: option of each block.
        groups: one per group of the problem.
        step_times_s: Time_t, each as small as 4.19 to 4.23 allow.
        objective_s: their sum; per unit of the batch where that is chosen.
        batch: 1, or the batch chosen (4.5.3), not rounded.
    """

    options: tuple[int, ...]
    groups: tuple[Fractions, ...]
    step_times_s: tuple[float, ...]
    objective_s: float
    batch: float = 1.0


@dataclass(frozen=True)
class OIlpAnswer:
    """The result of a solve.

    Attributes:
        status: "infeasible" and "optimal" (within the gap asked for) are proofs; "unknown": the limit came first.
        solution: None unless the status is "optimal" or "feasible".
        bound_s: proven lower bound on the objective.
        smallest_budget_bytes: where infeasible, the smallest device budget for which there is a solution; None if
            another limit excludes one (or the time limit came first).
        solver, wall_s: name and version of the solver; seconds of all solves together.
    """

    status: Status
    solution: OIlpSolution | None
    bound_s: float
    smallest_budget_bytes: int | None
    solver: str
    wall_s: float

    @property
    def gap(self) -> float:
        """Return (objective − bound) / objective; infinite without a solution."""
        if self.solution is None:
            return float("inf")
        objective_s = self.solution.objective_s
        return max(0.0, (objective_s - self.bound_s) / objective_s) if objective_s else 0.0


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
            within the memory that the relaxation gives to activations, and solves the rest again: for long chains.
        solver: "highs" or "cbc".
        limits: what may be decided; everything by default.
    """
    limits = limits or OIlpLimits()
    if method == "exact" or limits.options is not None:
        m = build(problem, limits)
        outcome = _solve(m, settings, solver)
        answer = _answer(m, outcome, _bound_s(m, outcome, settings))
    else:
        answer = _relax_and_round(problem, settings, solver, limits)
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
    m = build(problem, free)
    outcome = _solve(m, settings, solver)
    if not outcome.found:
        return None, outcome.wall_s
    # Add a little to what the solver says, since its rows hold within 1e-6 of a unit.
    smallest = outcome.objective * m.memory_unit
    return math.ceil(smallest + 4e-6 * m.memory_unit - 1e-4), outcome.wall_s


def _solve(m: OIlp, settings: SolverSettings, solver: MilpSolver) -> SolverOutcome:
    """Start a program with integers from the leanest options, and solve the rest as a linear program.

    That start is almost always feasible if the problem is; it is deliberately not good, or the solver would stop at
    once.
    """
    if not m.model.isMIP() or m.limits.options is not None:
        return solve_milp(m.model, settings, solver=solver)
    lean = build(m.problem, replace(m.limits, options=_leanest(m.problem), relaxed=True))
    start = solve_milp(lean.model, settings, solver=solver)
    if start.found:
        values = {variable.name: variable.varValue or 0.0 for variable in lean.model.variables()}
        for variable in m.model.variables():
            value = values.get(variable.name, 0.0)
            variable.setInitialValue(round(value) if variable.cat == pulp.LpInteger else value, check=False)
    outcome = solve_milp(m.model, settings, solver=solver, warm_start=start.found)
    return replace(outcome, wall_s=start.wall_s + outcome.wall_s)


def _relax_and_round(
    problem: OffloadProblem, settings: SolverSettings, solver: MilpSolver, limits: OIlpLimits
) -> OIlpAnswer:
    m = build(problem, replace(limits, relaxed=True))
    relaxed = solve_milp(m.model, settings, solver=solver)
    bound_s = _bound_s(m, relaxed, settings)
    if not relaxed.found:
        return _answer(m, relaxed, bound_s)
    shares = [[_value(v) for v in comp] for comp in m.comp]
    best = _answer(m, replace(relaxed, status="unknown"), bound_s)
    tried: set[tuple[int, ...]] = set()
    wall_s = relaxed.wall_s
    for options in _roundings(problem, shares):
        if options in tried:
            continue
        tried.add(options)
        fixed = build(problem, replace(limits, options=options, relaxed=True))
        outcome = solve_milp(fixed.model, settings, solver=solver)
        wall_s += outcome.wall_s
        answer = _answer(fixed, outcome, bound_s)
        if answer.solution is None:
            continue
        if best.solution is None or answer.solution.objective_s < best.solution.objective_s:
            best = replace(answer, status="feasible")
        if best.gap <= settings.gap:
            best = replace(best, status="optimal")
            break
    return replace(best, wall_s=wall_s)


def _roundings(problem: OffloadProblem, shares: list[list[float]]) -> Iterator[tuple[int, ...]]:
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


def _bound_s(m: OIlp, outcome: SolverOutcome, settings: SolverSettings) -> float:
    bound = outcome.bound
    if m.limits.relaxed and outcome.status == "optimal":
        bound = outcome.objective * (1 - 1e-7)
    return max(0.0, bound * m.time_unit / (1 + 2 * TRANSFER_COST))


def _answer(m: OIlp, outcome: SolverOutcome, bound_s: float) -> OIlpAnswer:
    solution = _read(m) if outcome.found else None
    if solution is not None:
        bound_s = min(bound_s, solution.objective_s)
    return OIlpAnswer(outcome.status, solution, bound_s, None, outcome.solver, outcome.wall_s)


def _read(m: OIlp) -> OIlpSolution:
    problem = m.problem
    steps = range(problem.steps)
    scale = _value(m.scale)
    by_group: dict[int, list[Portion]] = {}
    for p in m.portions:
        by_group.setdefault(p.number, []).append(p)

    def total(portions: Iterable[Portion], part: Callable[[Portion, int], Any]) -> tuple[float, ...]:
        return tuple(_snap(sum(_value(part(p, t)) for p in portions) / scale) for t in steps)

    def of(x: Moving | None, what: str, t: int, otherwise: Any) -> Any:
        return otherwise if x is None else getattr(x, what)(t)

    groups = []
    for number in range(len(problem.groups)):
        ps = by_group.get(number, [])
        groups.append(
            Fractions(
                stored=total(ps, lambda p, t: of(p.weights, "stored", t, p.size)),
                offloaded=total(ps, lambda p, t: of(p.weights, "offloaded", t, 0)),
                reloaded=total(ps, lambda p, t: of(p.weights, "reloaded", t, 0)),
                gradients=total(ps, lambda p, t: p.cpu.gradient(t, problem.last_gradient(p.group)) if p.cpu else 0),
                waiting=total(ps, lambda p, t: p.cpu.waiting(t) if p.cpu else 0),
                updated=total(ps, lambda p, t: p.cpu.updated(t) if p.cpu else 0),
                states_stored=total(ps, lambda p, t: of(p.states, "stored", t, 0)),
                states_offloaded=total(ps, lambda p, t: of(p.states, "offloaded", t, 0)),
                states_reloaded=total(ps, lambda p, t: of(p.states, "reloaded", t, 0)),
                on_cpu=_snap(sum(_value(p.on_cpu) for p in ps) / scale),
                on_disk=_snap(sum(_value(p.size) for p in ps if p.placement == "disk") / scale),
            )
        )
    options = tuple(max(range(len(comp)), key=[_value(v) for v in comp].__getitem__) for comp in m.comp)
    times = tuple(_value(v) * m.time_unit for v in m.time)
    return OIlpSolution(options, tuple(groups), times, sum(times), 1.0 / scale)


def _value(expression: Any) -> float:
    value = expression if isinstance(expression, (int, float)) else expression.value()
    return float(value or 0.0)


def _snap(fraction: float) -> float:
    """Snap values within solver tolerance to 0 or 1."""
    if fraction < _SNAP:
        return 0.0
    return 1.0 if fraction > 1.0 - _SNAP else fraction
