"""Finds the units that take most memory at one row: maximum coverage with weights.

| symbol | meaning |
|---|---|
| U, k | units; how many may train |
| S, b_S | guards of the row; bytes of each, shared inputs once |
| x_u | unit u trains |
| y_S | something of guard S trains |

    max  Σ_S b_S · y_S                      (1)
    s.t. y_S ≤ Σ_{u ∈ S} x_u                (2)
         Σ_u x_u ≤ k                        (3)
         x binary, 0 ≤ y ≤ 1

Backward goes through a model from the end to the front, so most guards are either one unit or all units from the front
up to one. If ℓ is the first unit that trains, all guards that have ℓ count, guards that end before ℓ do not, and of the
rest, where it is of single units, the k − 1 largest count: no solver is needed. Other guards go to a solver, if the
bound that counts them all is not good enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stowage.stages.ir.units import ALWAYS, bit
from stowage.stages.solver.milp import pulp, solve_milp
from stowage.stages.solver.outcome import SolverSettings


@dataclass(frozen=True)
class Covered:
    """The most bytes at one row, or a bound on them.

    Attributes:
        nbytes: the bytes that the mask takes.
        mask: the units that train.
        bound_bytes: no mask takes more.
    """

    nbytes: int
    mask: int
    bound_bytes: int

    @property
    def proven(self) -> bool:
        """Return whether no mask takes more."""
        return self.nbytes >= self.bound_bytes


def quick_bound(by_guard: Mapping[int, int], k: int) -> int:
    """Return bytes that no mask of k units exceeds: guards of several units, and the k largest of one."""
    single = sorted((nbytes for guard, nbytes in by_guard.items() if _is_single(guard)), reverse=True)
    shared = sum(max(0, nbytes) for guard, nbytes in by_guard.items() if not _is_single(guard) and not guard & ALWAYS)
    return sum(max(0, b) for b in single[:k]) + shared + sum(b for g, b in by_guard.items() if g & ALWAYS)


def by_first_unit(by_guard: Mapping[int, int], count: int, k: int) -> Covered:
    """Return the best mask that the first unit which trains decides, and a bound on all masks."""
    always = sum(b for g, b in by_guard.items() if g & ALWAYS)
    if k <= 0:
        return Covered(always, ALWAYS, always)
    guards = [(g, b) for g, b in by_guard.items() if not g & ALWAYS]
    best, best_mask, bound = always, ALWAYS, always
    for first in range(count):
        own = bit(first)
        above = ~(2 * own - 1)
        taken, open_, single, mixed = always, 0, dict[int, int](), False
        for guard, nbytes in guards:
            rest = guard & above
            if guard & own:
                taken += nbytes
            elif rest and not rest & (rest - 1):
                single[rest] = single.get(rest, 0) + nbytes
            elif rest:  # some are below 0, and count where a unit that is chosen is of them
                open_, mixed = open_ + max(0, nbytes), True
        chosen = sorted((u for u in single if single[u] > 0), key=lambda u: (-single[u], u))[: k - 1]
        bound = max(bound, taken + sum(single[u] for u in chosen) + open_)
        mask = ALWAYS | own | sum(chosen)
        found = sum(b for g, b in by_guard.items() if g & mask) if mixed else taken + sum(single[u] for u in chosen)
        if found > best:
            best, best_mask = found, mask
    return Covered(best, best_mask, bound)


def solved_coverage(by_guard: Mapping[int, int], count: int, k: int, settings: SolverSettings) -> Covered:
    """Return the mask of at most k units that takes most bytes, by equations (1) to (3)."""
    guards = [(g, b) for g, b in by_guard.items() if not g & ALWAYS]
    problem = pulp.LpProblem("worst_mask", pulp.LpMinimize)
    x = [pulp.LpVariable(f"x_{u}", cat=pulp.LpBinary) for u in range(count)]
    y = [pulp.LpVariable(f"y_{i}", 0, 1) for i in range(len(guards))]
    problem += pulp.lpSum(-b * v for (_, b), v in zip(guards, y, strict=True))
    for i, (guard, nbytes) in enumerate(guards):
        members = [x[u] for u in range(count) if guard & bit(u)]
        if nbytes >= 0:
            problem += y[i] <= pulp.lpSum(members), f"covered_{i}"
        else:  # memory that a sum takes over: it counts wherever its row runs
            for number, member in enumerate(members):
                problem += y[i] >= member, f"given_back_{i}_{number}"
    problem += pulp.lpSum(x) <= k, "at_most"
    outcome = solve_milp(problem, settings)
    always = sum(b for g, b in by_guard.items() if g & ALWAYS)
    if not outcome.found:
        return Covered(always, ALWAYS, sum(max(0, b) for b in by_guard.values()))
    mask = ALWAYS | sum(bit(u) for u in range(count) if x[u].varValue > 0.5)
    nbytes = sum(b for g, b in by_guard.items() if g & mask)
    bound = nbytes if outcome.status == "optimal" else always + int(-outcome.bound) + 1
    return Covered(nbytes, mask, max(nbytes, bound))


def _is_single(guard: int) -> bool:
    return not guard & ALWAYS and not guard & (guard - 1)
