"""Checkmate: one mixed integer program for the schedule of a block.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, as the thesis
states it (2.1.1). The thesis leaves its equations unnumbered; here they bear the numbers C.1 to C.10, in its order.

| symbol | here | meaning | unit |
|---|---|---|---|
| T | `T` | number of stages and of nodes, the loss node included | |
| C_i | `time_s` | time of node i | s |
| M_i | `size` | bytes of everything that node i creates: its value | memory unit |
| DEPS[k] | `deps` | nodes whose values node k reads | |
| USERS[i] | `users` | nodes that read the value of node i | |
| R[t,i] | `R` | node i is computed in stage t | 0/1 |
| S[t,i] | `S` | the value of node i is saved from stage t−1 until stage t | 0/1 |
| FREE[t,i,k] | `FREE` | the value of node i is freed in stage t, after node k | 0/1 |
| U[t,k] | `U` | memory in use while node k runs in stage t, its workspace aside | memory unit |
| M_budget, M_save | `peak`, `save` | budgets | memory unit |

Stages and nodes count from 0. Unlike in RK-Checkmate (`rk_checkmate`) a node has one value, kept or freed as a whole:
its result and what it saves for backward cannot be separated, and readers depend on nodes, not on allocations.

Where this differs from the thesis, and why:

- The loss node is a node as in RK-Checkmate, and M_save bounds what is in memory when it runs (equation `save`).
- Blocks have workspace (C.10), nodes that run once (`once`), and values that stay at the end (`outgoing`).
- Stage t ends with the first computation of node t (C.5), which the thesis only shows in a figure and in the bounds of
  its sums.
- A value that is in memory is not computed again (`single`): it would count twice, and is never useful.
- In num_hazards the thesis sums over users with i > k; it must be j > k.
- The schedule frees allocations by their own last use, which takes no more memory than the values do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stowage.stages.formulations.block.staged_milp import StagedMilp, solve_staged
from stowage.stages.formulations.block.staged_order import (
    Executions,
    schedule_of,
    timeline,
    units,
)
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.solver.equations import Constraints, add_equations
from stowage.stages.solver.milp import MilpSolver, pulp
from stowage.stages.solver.outcome import SolverSettings


@dataclass
class Checkmate(StagedMilp):
    """Holds the model's data, variables and problem; `build` adds the constraints."""

    def __post_init__(self) -> None:
        T, binary = self.T, pulp.LpBinary
        self.R = {(t, i): pulp.LpVariable(f"R_{t}_{i}", cat=binary) for t in range(T) for i in range(T)}
        self.S = {(t, i): pulp.LpVariable(f"S_{t}_{i}", cat=binary) for t in range(T + 1) for i in range(T)}
        self.FREE = {
            (t, i, k): pulp.LpVariable(f"FREE_{t}_{i}_{k}", cat=binary)
            for t in range(T)
            for k in range(t + 1)
            for i in (*self.deps[k], k)
        }
        self.U = {(t, k): pulp.LpVariable(f"U_{t}_{k}", lowBound=0) for t in range(T) for k in range(t + 1)}

    @cached_property
    def deps(self) -> tuple[tuple[int, ...], ...]:
        """Return DEPS[k], ascending."""
        creator = self.graph.creator
        return tuple(tuple(sorted({creator[a] for a in node.reads})) for node in self.graph.nodes)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Return USERS[i], ascending."""
        return tuple(tuple(k for k in range(self.T) if i in self.deps[k]) for i in range(self.T))

    @cached_property
    def outgoing(self) -> frozenset[int]:
        """Return the nodes with an output that is in memory at the end."""
        return frozenset(self.graph.creator[a] for a in self.graph.block.outgoing)

    def size(self, i: int) -> int:
        """Return M_i, the memory units of the value of node i."""
        return sum(units(self.graph.nbytes[a], self.unit) for a in self.graph.nodes[i].creates)

    def hazards(self, t: int, i: int, k: int) -> tuple[Any, int]:
        """Return num_hazards(t, i, k), and its largest possible value (κ)."""
        later = [j for j in self.users[i] if k < j <= t]
        return (1 - self.R[t, k]) + self.S[t + 1, i] + pulp.lpSum(self.R[t, j] for j in later), 2 + len(later)

    def mem_freed(self, t: int, k: int) -> Any:
        """Return mem_freed_t(v_k): memory that is freed right after node k."""
        return pulp.lpSum(self.size(i) * self.FREE[t, i, k] for i in (*self.deps[k], k))


def eq_c_1(m: Checkmate) -> Constraints:
    """Compute a node only where the values it reads are saved or computed in the same stage."""
    for t in range(m.T):
        for j in range(t + 1):
            for i in m.deps[j]:
                yield f"{t}_{i}_{j}", m.R[t, j] <= m.R[t, i] + m.S[t, i]


def eq_c_2(m: Checkmate) -> Constraints:
    """Save only a value that was computed in the stage before, or saved before."""
    for t in range(1, m.T + 1):
        for i in range(m.T):
            yield f"{t}_{i}", m.S[t, i] <= m.R[t - 1, i] + m.S[t - 1, i]


def eq_c_3(m: Checkmate) -> Constraints:
    """Save nothing before the first stage."""
    yield "", pulp.lpSum(m.S[0, i] for i in range(m.T)) == 0


def eq_c_4(m: Checkmate) -> Constraints:
    """Compute the last node."""
    yield "", pulp.lpSum(m.R[t, m.T - 1] for t in range(m.T)) >= 1


def eq_c_5(m: Checkmate) -> Constraints:
    """End stage t with the first computation of node t: nothing later is computed or saved before."""
    yield "diagonal", pulp.lpSum(m.R[t, t] for t in range(m.T)) == m.T
    yield "computed", pulp.lpSum(m.R[t, i] for t in range(m.T) for i in range(t + 1, m.T)) == 0
    yield "saved", pulp.lpSum(m.S[t, i] for t in range(m.T) for i in range(t, m.T)) == 0


def eq_c_6(m: Checkmate) -> Constraints:
    """Start a stage with the saved values, to which its first node adds its value."""
    for t in range(m.T):
        saved = pulp.lpSum(m.size(i) * m.S[t, i] for i in range(m.T))
        yield f"{t}", m.U[t, 0] == saved + m.size(0) * m.R[t, 0]


def eq_c_7(m: Checkmate) -> Constraints:
    """Update the memory from node to node: free what the last one frees, add the value of the next."""
    for t in range(m.T):
        for k in range(t):
            yield f"{t}_{k}", m.U[t, k + 1] == m.U[t, k] - m.mem_freed(t, k) + m.size(k + 1) * m.R[t, k + 1]


def eq_c_8(m: Checkmate) -> Constraints:
    """Free a value without hazards: 1 − FREE ≤ num_hazards."""
    for t, i, k in m.FREE:
        yield f"{t}_{i}_{k}", 1 - m.FREE[t, i, k] <= m.hazards(t, i, k)[0]


def eq_c_9(m: Checkmate) -> Constraints:
    """Keep a value that has a hazard: κ (1 − FREE) ≥ num_hazards."""
    for t, i, k in m.FREE:
        hazards, most = m.hazards(t, i, k)
        yield f"{t}_{i}_{k}", most * (1 - m.FREE[t, i, k]) >= hazards


def eq_c_10(m: Checkmate) -> Constraints:
    """Keep the memory within the budget while each node runs, its workspace included."""
    for t, k in m.U:
        workspace = units(m.graph.nodes[k].workspace_bytes, m.unit)
        yield f"{t}_{k}", m.U[t, k] + workspace * m.R[t, k] <= m.peak


def save(m: Checkmate) -> Constraints:
    """Keep the memory at the loss, without the incoming gradient, within M_save."""
    yield "", m.U[m.graph.loss, m.graph.loss] <= m.save + m.size(m.graph.loss)


def once(m: Checkmate) -> Constraints:
    """Compute the loss and every other `once` node once."""
    for i, node in enumerate(m.graph.nodes):
        if node.once:
            yield f"{i}", pulp.lpSum(m.R[t, i] for t in range(m.T)) == 1


def outgoing(m: Checkmate) -> Constraints:
    """Save after the last stage exactly the values that leave the block."""
    for i in range(m.T):
        yield f"{i}", m.S[m.T, i] == int(i in m.outgoing)


def single(m: Checkmate) -> Constraints:
    """Forbid to compute a value that is saved."""
    for t in range(m.T):
        for i in range(t):
            yield f"{t}_{i}", m.R[t, i] + m.S[t, i] <= 1


EQUATIONS: dict[str, Callable[[Checkmate], Constraints]] = {
    "C.1": eq_c_1,
    "C.2": eq_c_2,
    "C.3": eq_c_3,
    "C.4": eq_c_4,
    "C.5": eq_c_5,
    "C.6": eq_c_6,
    "C.7": eq_c_7,
    "C.8": eq_c_8,
    "C.9": eq_c_9,
    "C.10": eq_c_10,
    "save": save,
    "once": once,
    "outgoing": outgoing,
    "single": single,
}
"""The function that writes each equation; constraints have names like `eq_c_7_…`, `save` or `once_…`."""


def build(block: BlockGraph, peak_bytes: int, save_bytes: int) -> Checkmate:
    """Build the whole model."""
    m = Checkmate.of("checkmate", block, peak_bytes, save_bytes)
    lower = [(t, i) for t in range(m.T) for i in range(t + 1)]
    m.problem += pulp.lpSum(m.graph.nodes[i].time_s * m.R[t, i] for t, i in lower), "time"
    add_equations(m.problem, EQUATIONS, m)
    return m


def checkmate(
    block: BlockGraph,
    peak_bytes: int,
    save_bytes: int,
    settings: SolverSettings,
    *,
    solver: MilpSolver = "highs",
    hint: Executions | None = None,
) -> tuple[BlockSchedule | None, SolveReport | None]:
    """Find the fastest schedule of `block` within both budgets that keeps or frees each node's outputs as a whole.

    Args:
        block: graph to schedule.
        peak_bytes: M_budget, bytes in memory at any moment of forward or backward (see `ir.block` for what counts).
        save_bytes: M_save, bytes between forward and backward, output included, incoming gradient not.
        settings: limits of the solver.
        solver: "highs" or "cbc".
        hint: stages of each node in a schedule within both budgets, as a warm start.

    Returns:
        Schedule and report; `(None, None)` where there is provably no schedule; `(None, report)` with status
        "feasible" and an infinite objective where the limit came first.
    """
    model = build(block, peak_bytes, save_bytes)
    return solve_staged(model, settings, solver, hint, start=_warm_start, read=_read)


def _read(model: Checkmate) -> tuple[BlockSchedule, float]:
    """Return the schedule of the executions that the solver chose, and their time."""
    executions = {i: [t for t in range(i, model.T) if model.R[t, i].value() > 0.5] for i in range(model.T)}
    objective_s = sum(model.graph.nodes[i].time_s * len(stages) for i, stages in executions.items())
    return schedule_of(model.graph, timeline(model.graph, executions)), objective_s


def _warm_start(model: Checkmate, executions: Executions) -> None:
    """Give every variable its value in a schedule of these executions that frees values as early as possible."""
    for variable in model.problem.variables():
        variable.setInitialValue(0)
    T = model.T
    ran = {(t, i) for i, stages in executions.items() for t in stages}
    # Saved: used in a later stage before it is computed there.
    saved = {(T, i) for i in model.outgoing}
    for t in range(T - 1, -1, -1):
        for i in range(t):
            used = any((t, k) in ran for k in model.users[i] if k <= t) or (t + 1, i) in saved
            if used and (t, i) not in ran:
                saved.add((t, i))
    for t, i in ran:
        model.R[t, i].setInitialValue(1)
    for t, i in saved:
        model.S[t, i].setInitialValue(1)
    for t in range(T):
        used_units = sum(model.size(i) for i in range(T) if (t, i) in saved)
        for k in range(t + 1):
            used_units += model.size(k) * ((t, k) in ran)
            model.U[t, k].setInitialValue(used_units)
            for i in (*model.deps[k], k):
                later = any((t, j) in ran for j in model.users[i] if k < j <= t)
                if (t, k) in ran and (t + 1, i) not in saved and not later:
                    model.FREE[t, i, k].setInitialValue(1)
                    used_units -= model.size(i)
