"""H-ILP: data and variables of the MILP for one H-Graph (thesis 3.4); the equations are in `equations.py`.

| symbol | here | meaning | unit |
|---|---|---|---|
| T | `T` | nodes, the loss node included; as many stages | – |
| l | `loss` | the loss node | – |
| F_j, B_j | `clusters[j].forward`, `.backward` | forward and backward node of cluster j | – |
| k → d, d → k | `makers(d)`, `readers(d)` | node k contributes to value d, reads it | – |
| d →ᵒ k | `Way.reads` | way o of node k reads d | – |
| time[k,o] | `Way.time_s` | time of node k run in way o | s |
| s_d | `size(d)` | bytes of value d | memory unit |
| p[j,o] | `phantom(j, o)` | bytes of the phantom of cluster j under option o | memory unit |
| m[k,o,i] | `HStep.internal_bytes` | what node k keeps by itself at step i of way o | memory unit |
| B, M_save | `limit`, `save` | budgets; where the peak is minimised, B is a variable, `peak` at most | memory unit |
| Comp[t,k,o] | `Comp` | node k runs in stage t in way o | 0/1 |
| sumComp[t,k] | `sum_comp` | node k runs in stage t | 0/1 |
| P[t,d] | `P` | value d is in memory before stage t | 0/1 |
| S[t,k,d] | `S` | the contribution of node k is in value d before stage t | 0/1 |
| Sp[t,j,o] | `Sp` | the phantom of cluster j, option o, is in memory before stage t | 0/1 |
| C[t,k,d] | `C` | value d is made when node k runs in stage t | 0/1 |
| D[t,k,d] | `D` | value d is freed right after node k in stage t | 0/1 |
| A[t,k,d] | `alive` | value d is in memory after step k of stage t | 0/1 |
| U[t,k] | `U` | memory in use after step k of stage t | memory unit |

Stages and nodes count from 0; S, Sp and P also exist after the last stage, as number T. The ways of a node are the
options of its cluster and the plain way, which leaves no phantom. The thesis has no plain way, and none for a forward
node: there 3.16 and 3.18 together forbid any second run of F_j before B_j, since the phantom of the first stays until
B_j takes it. Fast-forward (RK-Checkmate's R') is what makes recomputing possible at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from stowage.stages.formulations.block.staged_order import units
from stowage.stages.formulations.cluster.problem import ClusterWay, HProblem
from stowage.stages.solver.milp import pulp

_LARGEST_MEMORY = 1_000_000

Objective = Literal["time", "peak"]
"""The quantity to minimise: the time within both budgets, or M_peak, however slow."""


@dataclass
class HIlp:
    """Holds data, variables and problem; `equations.build` adds the constraints."""

    data: HProblem
    peak: int
    save: int
    unit: int
    corrections: bool
    minimise: Objective = "time"
    problem: Any = field(default_factory=lambda: pulp.LpProblem("h_ilp", pulp.LpMinimize))

    @staticmethod
    def of(
        data: HProblem, peak_bytes: int, save_bytes: int, *, corrections: bool, minimise: Objective = "time"
    ) -> HIlp:
        """Make the data of the model; sizes round up to the memory unit, budgets down."""
        unit = data.memory_unit((peak_bytes, save_bytes), _LARGEST_MEMORY)
        if minimise == "peak":
            peak_bytes += unit - 1  # the least peak known, in units, is one that the model can reach
        return HIlp(data, peak_bytes // unit, save_bytes // unit, unit, corrections, minimise)

    def __post_init__(self) -> None:
        T, data = self.T, self.data
        peak = pulp.LpVariable("peak", lowBound=0, upBound=self.peak) if self.minimise == "peak" else self.peak
        self.limit: Any = peak
        self.Comp = {
            (t, k, w): pulp.LpVariable(f"Comp_{t}_{k}_{_name(way)}", cat=pulp.LpBinary)
            for t in range(T)
            for k in range(T)
            for w, way in enumerate(data.ways[k])
        }
        before, values = range(T + 1), range(len(data.nbytes))
        self.P = {(t, d): pulp.LpVariable(f"P_{t}_{d}", cat=pulp.LpBinary) for t in before for d in values}
        self.S = {
            (t, k, d): pulp.LpVariable(f"S_{t}_{k}_{d}", cat=pulp.LpBinary)
            for t in before
            for d in values
            for k in self.makers(d)
        }
        self.Sp = {
            (t, j, o): pulp.LpVariable(f"Sp_{t}_{j}_{o}", cat=pulp.LpBinary)
            for t in before
            for j, cluster in enumerate(data.graph.clusters)
            for o in range(len(cluster.options))
        }
        self.C = {
            (t, k, d): pulp.LpVariable(f"C_{t}_{k}_{d}", cat=pulp.LpBinary)
            for t in range(T)
            for d in values
            for k in self.makers(d)
            if k <= t
        }
        self.D = {
            (t, k, d): pulp.LpVariable(f"D_{t}_{k}_{d}", cat=pulp.LpBinary)
            for t in range(T)
            for d in values
            for k in self.related(t, d)
        }
        self.U = {
            (t, k): pulp.LpVariable(f"U_{t}_{k}", lowBound=0, upBound=self.peak) for t in range(T) for k in range(t + 1)
        }

    # Data.

    @property
    def T(self) -> int:  # noqa: N802
        """Return the number of stages and of nodes."""
        return self.data.size

    @property
    def loss(self) -> int:
        """Return the number of the loss node."""
        return self.data.graph.loss

    @cached_property
    def stages_and_nodes(self) -> list[tuple[int, int]]:
        """Return the pairs (t, k) with k ≤ t."""
        return [(t, k) for t in range(self.T) for k in range(t + 1)]

    def makers(self, d: int) -> tuple[int, ...]:
        """Return the nodes k → d."""
        return self.data.contributors[d]

    def readers(self, d: int) -> tuple[int, ...]:
        """Return the nodes with d → k or d →ᵒ k."""
        return self.data.readers[d]

    def related(self, t: int, d: int) -> list[int]:
        """Return the nodes k ↔ d that may run in stage t, ascending."""
        return [k for k in sorted({*self.makers(d), *self.readers(d)}) if k <= t]

    def size(self, d: int) -> int:
        """Return s_d in memory units."""
        return units(self.data.nbytes[d], self.unit)

    def phantom(self, j: int, o: int) -> int:
        """Return p[j,o] in memory units."""
        return units(self.data.graph.clusters[j].options[o].phantom_bytes, self.unit)

    # Expressions.

    def sum_comp(self, t: int, k: int) -> Any:
        """Return sumComp[t,k]."""
        return pulp.lpSum(self.Comp[t, k, w] for w in range(len(self.data.ways[k])))

    def option(self, t: int, k: int, o: int) -> Any:
        """Return Comp[t,k,o] for an option of its cluster."""
        return self.Comp[t, k, [way.option for way in self.data.ways[k]].index(o)]

    def reading(self, t: int, k: int, d: int) -> Any:
        """Return whether node k runs in stage t in a way that reads value d."""
        return pulp.lpSum(self.Comp[t, k, w] for w, way in enumerate(self.data.ways[k]) if d in way.reads)

    def touching(self, t: int, k: int, d: int) -> Any:
        """Return whether node k runs in stage t in a way that makes or reads value d."""
        return self.sum_comp(t, k) if k in self.makers(d) else self.reading(t, k, d)

    def alive(self, t: int, k: int, d: int) -> Any:
        """Return A[t,k,d] (3.20): saved, or created since, and not deleted since."""
        made = [self.C[t, c, d] for c in self.makers(d) if c <= k]
        released = [self.D[t, c, d] for c in self.related(t, d) if c <= k]
        return self.P[t, d] + pulp.lpSum(made) - pulp.lpSum(released)


def _name(way: ClusterWay) -> str:
    return "plain" if way.option is None else str(way.option)
