"""Reads answers of O-ILP: fractions of tensors, options, and the bound that was proven."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from stowage.stages.formulations.offload.o_ilp.equations import TRANSFER_COST
from stowage.stages.formulations.offload.o_ilp.model import OIlp
from stowage.stages.formulations.offload.o_ilp.quantities import Moving, Portion
from stowage.stages.solver.outcome import SolverOutcome, Status

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
    def objective_s(self) -> float:
        """Return the objective of the solution; infinite without one."""
        return float("inf") if self.solution is None else self.solution.objective_s

    @property
    def gap(self) -> float:
        """Return (objective − bound) / objective; infinite without a solution."""
        if self.solution is None:
            return float("inf")
        objective_s = self.solution.objective_s
        return max(0.0, (objective_s - self.bound_s) / objective_s) if objective_s else 0.0


def bound_of(m: OIlp, outcome: SolverOutcome) -> float:
    """Return the bound that a solve proves, in seconds."""
    bound = outcome.bound
    if m.limits.relaxed and outcome.status == "optimal":
        bound = outcome.objective * (1 - 1e-7)
    return max(0.0, bound * m.time_unit / (1 + 2 * TRANSFER_COST))


def answer_of(m: OIlp, outcome: SolverOutcome, bound_s: float) -> OIlpAnswer:
    """Read the answer of a solve, if there is one."""
    solution = solution_of(m) if outcome.found else None
    if solution is not None:
        bound_s = min(bound_s, solution.objective_s)
    return OIlpAnswer(outcome.status, solution, bound_s, None, outcome.solver, outcome.wall_s)


def solution_of(m: OIlp) -> OIlpSolution:
    """Read the values of all variables."""
    problem = m.problem
    steps = range(problem.steps)
    scale = value_of(m.scale)
    by_group: dict[int, list[Portion]] = {}
    for p in m.portions:
        by_group.setdefault(p.number, []).append(p)

    def total(portions: Iterable[Portion], part: Callable[[Portion, int], Any]) -> tuple[float, ...]:
        return tuple(_snap(sum(value_of(part(p, t)) for p in portions) / scale) for t in steps)

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
                on_cpu=_snap(sum(value_of(p.on_cpu) for p in ps) / scale),
                on_disk=_snap(sum(value_of(p.size) for p in ps if p.placement == "disk") / scale),
            )
        )
    options = tuple(max(range(len(comp)), key=[value_of(v) for v in comp].__getitem__) for comp in m.comp)
    times = tuple(value_of(v) * m.time_unit for v in m.time)
    return OIlpSolution(options, tuple(groups), times, sum(times), 1.0 / scale)


def value_of(expression: Any) -> float:
    """Return the value of an expression or a number."""
    value = expression if isinstance(expression, (int, float)) else expression.value()
    return float(value or 0.0)


def _snap(fraction: float) -> float:
    """Snap values within solver tolerance to 0 or 1."""
    if fraction < _SNAP:
        return 0.0
    return 1.0 if fraction > 1.0 - _SNAP else fraction
