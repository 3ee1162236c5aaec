"""RK-Checkmate: the MILP for one block (thesis 2.4), with the equations numbered as there.

| symbol | here | meaning | unit |
|---|---|---|---|
| T | `T` | compute nodes, the loss node included; as many stages | – |
| C_k | `nodes[k].time_s` | time of node k | s |
| M_i | `size(i)` | bytes of allocation i | memory unit |
| tmpM_k | `workspace(k)` | workspace of node k | memory unit |
| R[t,k] | `R` | node k runs in stage t | 0/1 |
| R'[t,k] | `Rf` | forward node k runs in stage t and its phantoms are freed when it ends (fast-forward) | 0/1 |
| S[t,i] | `S` | allocation i (no phantom) is complete and saved before stage t | 0/1 |
| S^p[t,j] | `Sp` | phantom j is saved before stage t | 0/1 |
| P[t,i] | `P` | allocation i is in memory before stage t; for a phantom P is S^p | 0/1 |
| create[t,i,k] | `create` | allocation i is made when node k runs in stage t | 0/1 |
| delete[t,i,k] | `delete` | allocation i is freed right after node k in stage t | 0/1 |
| U[t,k] | `U` | memory in use after step k of stage t | memory unit |
| M_peak, M_save | `peak`, `save` | budgets | memory unit |

Stages and nodes count from 0. An allocation has one creator here, so an edge e = (k, i) of ChildrenOfComp is named by
i, and |parents(a_i)| is 1.

Where this differs from the thesis, and why:

- A phantom is an allocation like any other: one that a forward node creates and only backward nodes read. It may stand
  beside other outputs of its node, there may be several, and several backward nodes may read one; so j counts phantoms,
  not forward/backward pairs, and a phantom is freed by its own `delete`, not with "the" backward node.
- Fast-forward does not make the kernel skip its phantoms: they are allocated, and freed at once. Their bytes count as
  workspace of that execution (2.18).
- The loss node takes no time, reads the block's output, and creates the incoming gradient, so that both follow from
  the ordinary rules. M_save counts what is in memory when it runs, without the incoming gradient.
- `once` nodes run in their own stage only; `outgoing` allocations are in memory after the last stage.
- Slips corrected: 2.3, 2.9, 2.14, 2.16, the objective, and R' in 2.13 and 2.15; see each function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stowage.stages.formulations.block.staged_milp import StagedMilp
from stowage.stages.formulations.block.staged_order import units
from stowage.stages.ir.block import BlockGraph
from stowage.stages.solver.equations import Constraints, add_equations
from stowage.stages.solver.milp import pulp


@dataclass
class RkCheckmate(StagedMilp):
    """Holds the model's data, variables and problem; `build` adds the constraints."""

    def __post_init__(self) -> None:
        T, binary = self.T, pulp.LpBinary
        self.R = {(t, k): pulp.LpVariable(f"R_{t}_{k}", cat=binary) for t in range(T) for k in range(T)}
        self.Rf = {
            (t, k): pulp.LpVariable(f"Rf_{t}_{k}", cat=binary)
            for t in range(T)
            for k in range(self.loss)
            if self.graph.phantoms(k)
        }
        after = range(T + 1)
        self.S = {(t, i): pulp.LpVariable(f"S_{t}_{i}", cat=binary) for t in after for i in self.solid}
        self.Sp = {(t, j): pulp.LpVariable(f"Sp_{t}_{j}", cat=binary) for t in after for j in self.phantoms}
        self.P = {(t, i): pulp.LpVariable(f"P_{t}_{i}", cat=binary) for t in after for i in self.solid} | self.Sp
        self.create = {
            (t, i): pulp.LpVariable(f"create_{t}_{i}_{self.parent[i]}", cat=binary)
            for t in range(T)
            for i in self.all
            if self.parent[i] <= t
        }
        self.delete = {
            (t, i, k): pulp.LpVariable(f"delete_{t}_{i}_{k}", cat=binary)
            for t in range(T)
            for i in self.all
            for k in self.touching(t, i)
        }
        self.U = {(t, k): pulp.LpVariable(f"U_{t}_{k}", lowBound=0) for t in range(T) for k in range(t + 1)}

    # Data.

    @property
    def loss(self) -> int:
        """Return the number of the loss node."""
        return self.graph.loss

    @property
    def parent(self) -> dict[int, int]:
        """Return the node that creates each allocation (the loss node for incoming gradients)."""
        return self.graph.creator

    @cached_property
    def all(self) -> tuple[int, ...]:
        """Return every allocation, ascending."""
        return tuple(sorted(self.graph.creator))

    @cached_property
    def phantoms(self) -> tuple[int, ...]:
        """Return the phantoms j."""
        return tuple(sorted(j for k in range(self.loss) for j in self.graph.phantoms(k)))

    @cached_property
    def solid(self) -> tuple[int, ...]:
        """Return the allocations that are no phantoms."""
        return tuple(i for i in self.all if i not in set(self.phantoms))

    def children(self, i: int) -> tuple[int, ...]:
        """Return the nodes that read allocation i."""
        return self.graph.readers[i]

    def touching(self, t: int, i: int) -> list[int]:
        """Return ParentsOfAlloc[i] ∪ ChildrenOfAlloc[i], as far as they exist in stage t, ascending."""
        return [k for k in (self.parent[i], *self.children(i)) if k <= t]

    def size(self, i: int) -> int:
        """Return M_i in memory units."""
        return units(self.graph.nbytes[i], self.unit)

    def workspace(self, k: int) -> int:
        """Return tmpM_k in memory units."""
        return units(self.graph.nodes[k].workspace_bytes, self.unit)

    # Expressions.

    def executed(self, t: int, k: int) -> Any:
        """Return R + R'."""
        return self.R[t, k] + self.Rf[t, k] if (t, k) in self.Rf else self.R[t, k]

    def touched(self, t: int, i: int, k: int) -> Any:
        """Return whether node k runs in stage t in a way that needs allocation i: fast-forward keeps no phantoms."""
        return self.R[t, k] if i in self.phantoms else self.executed(t, k)

    def alive(self, t: int, i: int, k: int) -> Any:
        """Return whether allocation i is in memory after step k of stage t."""
        made = self.create[t, i] if self.parent[i] <= k and (t, i) in self.create else 0
        released = [self.delete[t, i, k2] for k2 in self.touching(t, i) if k2 <= k]
        return self.P[t, i] + made - pulp.lpSum(released)


def eq_2_3(m: RkCheckmate) -> Constraints:
    """Recompute only what earlier stages executed.

    The thesis forbids R' on the diagonal, where 2.5 needs it; it must forbid R' above the diagonal, like R.
    """
    above = [(t, k) for t in range(m.T) for k in range(t + 1, m.T)]
    yield "", pulp.lpSum(m.executed(t, k) for t, k in above) == 0


def eq_2_4(m: RkCheckmate) -> Constraints:
    """Save nothing before its first computation."""
    for i in m.solid:
        yield f"{i}", pulp.lpSum(m.S[t, i] for t in range(m.parent[i] + 1)) == 0


def eq_2_5(m: RkCheckmate) -> Constraints:
    """End stage t with node t."""
    yield "", pulp.lpSum(m.executed(t, t) for t in range(m.T)) == m.T


def eq_2_6(m: RkCheckmate) -> Constraints:
    """Compute the loss, and every other `once` node, once."""
    for k, node in enumerate(m.graph.nodes):
        if node.once:
            yield f"{k}", pulp.lpSum(m.executed(t, k) for t in range(m.T)) == 1


def eq_2_7(m: RkCheckmate) -> Constraints:
    """Save only what was saved before or has just been computed."""
    for t in range(m.T):
        for i in m.solid:
            yield f"{t}_{i}", m.S[t + 1, i] <= m.S[t, i] + m.executed(t, m.parent[i])


def eq_2_8(m: RkCheckmate) -> Constraints:
    """Run a node only when each of its inputs is saved or computed in the same stage."""
    for t in range(m.T):
        for i in m.solid:
            for k in m.children(i):
                if k <= t:
                    yield f"{t}_{i}_{k}", m.executed(t, k) <= m.executed(t, m.parent[i]) + m.S[t, i]


def eq_2_9(m: RkCheckmate) -> Constraints:
    """Save phantoms only from a normal execution of their forward node.

    The thesis writes S^p_t ≤ R_t, which would lose a phantom after one stage; it must be S^p_{t+1} ≤ S^p_t + R_t, and
    no phantom before its node has run.
    """
    for j in m.phantoms:
        k = m.parent[j]
        yield f"first_{j}", pulp.lpSum(m.Sp[t, j] for t in range(k + 1)) == 0
        for t in range(m.T):
            yield f"{t}_{j}", m.Sp[t + 1, j] <= m.Sp[t, j] + m.R[t, k]


def eq_2_10(m: RkCheckmate) -> Constraints:
    """Give backward nodes their phantoms, saved or made in the same stage."""
    for t in range(m.T):
        for j in m.phantoms:
            for k in m.children(j):
                if k <= t:
                    yield f"{t}_{j}_{k}", m.R[t, k] <= m.R[t, m.parent[j]] + m.Sp[t, j]


def eq_2_11(m: RkCheckmate) -> Constraints:
    """Keep an allocation with a saved contribution in memory; |parents| is 1, so this and 2.12 say the same."""
    for t in range(m.T + 1):
        for i in m.solid:
            yield f"{t}_{i}", m.P[t, i] >= m.S[t, i]


def eq_2_12(m: RkCheckmate) -> Constraints:
    """Save no contribution in an allocation that is not in memory; before the first stage there are none."""
    for i in m.solid:
        yield f"first_{i}", pulp.lpSum(m.P[t, i] for t in range(m.parent[i] + 1)) == 0
        for t in range(m.T + 1):
            yield f"{t}_{i}", m.S[t, i] <= m.P[t, i]


def eq_2_13(m: RkCheckmate) -> Constraints:
    """Keep what a node makes or reads in memory while it runs, or until right after; R' makes and reads as R does."""
    for t, i, k in m.delete:
        yield f"{t}_{i}_{k}", m.alive(t, i, k) + m.delete[t, i, k] >= m.touched(t, i, k)


def eq_2_14(m: RkCheckmate) -> Constraints:
    """Start the next stage with what is in memory after the last possible step of a stage.

    The thesis writes P_t; it must be P_{t+1}.
    """
    for t in range(m.T - 1):
        for i in m.all:
            steps = m.touching(t, i)
            if steps:
                yield f"{t}_{i}", m.alive(t, i, steps[-1]) == m.P[t + 1, i]


def eq_2_15(m: RkCheckmate) -> Constraints:
    """Create an allocation only when its creator runs; phantoms only in a normal execution."""
    for t, i in m.create:
        yield f"{t}_{i}", m.create[t, i] <= m.touched(t, i, m.parent[i])


def eq_2_16(m: RkCheckmate) -> Constraints:
    """Free an allocation after the last step of the stage that needs it, unless the next stage starts with it.

    Inside num_hazards the thesis multiplies where it must add (as in Checkmate), and counts the readers that do not
    run; it must count those that do: num_hazards = (1 − R_k) + P_{t+1} + Σ_{later readers} R_{k'}.
    """
    for t, i, k in m.delete:
        later = [k2 for k2 in m.touching(t, i) if k2 > k]
        hazards = (1 - m.touched(t, i, k)) + m.P[t + 1, i] + pulp.lpSum(m.touched(t, i, k2) for k2 in later)
        most = 2 + len(later)
        yield f"no_hazard_{t}_{i}_{k}", 1 - m.delete[t, i, k] <= hazards
        yield f"hazard_{t}_{i}_{k}", most * (1 - m.delete[t, i, k]) >= hazards


def eq_2_17(m: RkCheckmate) -> Constraints:
    """Keep in memory after the last stage only what leaves the block."""
    t, outgoing = m.T - 1, set(m.graph.block.outgoing)
    for i in m.all:
        yield f"{i}", m.alive(t, i, m.touching(t, i)[-1]) == int(i in outgoing)
        yield f"end_{i}", m.P[t + 1, i] == int(i in outgoing)


def memory_in_use(m: RkCheckmate) -> Constraints:
    """Define U (unnumbered, before 2.18): the memory after each step, from the step before."""
    for t in range(m.T):
        for k in range(t + 1):
            before = m.U[t, k - 1] if k else pulp.lpSum(m.size(i) * m.P[t, i] for i in m.all)
            made = pulp.lpSum(m.size(i) * m.create[t, i] for i in m.graph.nodes[k].creates)
            read_or_made = sorted({*m.graph.nodes[k].creates, *m.graph.nodes[k].reads})
            released = pulp.lpSum(m.size(i) * m.delete[t, i, k] for i in read_or_made)
            yield f"{t}_{k}", m.U[t, k] == before + made - released


def eq_2_18(m: RkCheckmate) -> Constraints:
    """Keep every step's peak within M_peak.

    It is the memory in use after the step, what is freed right after it, workspace, and the phantoms that a
    fast-forward allocates and frees.
    """
    for t in range(m.T):
        for k in range(t + 1):
            node = m.graph.nodes[k]
            read_or_made = sorted({*node.creates, *node.reads})
            released = pulp.lpSum(m.size(i) * m.delete[t, i, k] for i in read_or_made)
            passing = sum(m.size(j) for j in m.graph.phantoms(k)) * m.Rf[t, k] if (t, k) in m.Rf else 0
            yield f"{t}_{k}", m.workspace(k) * m.executed(t, k) + passing + m.U[t, k] + released <= m.peak


def eq_2_19(m: RkCheckmate) -> Constraints:
    """Keep the memory at the loss, without the incoming gradient, within M_save."""
    k = m.loss
    node = m.graph.nodes[k]
    released = pulp.lpSum(m.size(i) * m.delete[k, i, k] for i in sorted({*node.creates, *node.reads}))
    yield "", m.U[k, k] + released <= m.save + sum(m.size(i) for i in node.creates)


def one_way(m: RkCheckmate) -> Constraints:
    """Let a node run in one way in a stage: R + R' ≤ 1 (2.4.1).

    Also, a fast-forward finds no phantom of its node in memory: making that again is a normal execution.
    """
    for t, k in m.Rf:
        yield f"{t}_{k}", m.R[t, k] + m.Rf[t, k] <= 1
        for j in m.graph.phantoms(k):
            yield f"phantom_{t}_{j}", m.Rf[t, k] + m.Sp[t, j] <= 1


def alive_is_binary(m: RkCheckmate) -> Constraints:
    """Require alive ∈ {0, 1} (2.4.3)."""
    for t, i, k in m.delete:
        yield f"low_{t}_{i}_{k}", m.alive(t, i, k) >= 0
        yield f"high_{t}_{i}_{k}", m.alive(t, i, k) <= 1


EQUATIONS: dict[str, Callable[[RkCheckmate], Constraints]] = {
    "2.3": eq_2_3,
    "2.4": eq_2_4,
    "2.5": eq_2_5,
    "2.6": eq_2_6,
    "2.7": eq_2_7,
    "2.8": eq_2_8,
    "2.9": eq_2_9,
    "2.10": eq_2_10,
    "2.11": eq_2_11,
    "2.12": eq_2_12,
    "2.13": eq_2_13,
    "2.14": eq_2_14,
    "2.15": eq_2_15,
    "2.16": eq_2_16,
    "2.17": eq_2_17,
    "2.18": eq_2_18,
    "2.19": eq_2_19,
    "one_way": one_way,
    "alive": alive_is_binary,
    "U": memory_in_use,
}
"""The function that writes each equation; a constraint's name is `eq_2_7_…`, or `one_way_…`, `alive_…`, `U_…`."""


def build(block: BlockGraph, peak_bytes: int, save_bytes: int) -> RkCheckmate:
    """Build the whole model, whose objective counts fast-forward time, which the thesis leaves out."""
    m = RkCheckmate.of("rk_checkmate", block, peak_bytes, save_bytes)
    lower = [(t, k) for t in range(m.T) for k in range(t + 1)]
    m.problem += pulp.lpSum(m.graph.nodes[k].time_s * m.executed(t, k) for t, k in lower), "time"
    add_equations(m.problem, EQUATIONS, m)
    return m
