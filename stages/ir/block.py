"""One block of the chain as the solvers see it: the papers' FB-Graph (thesis 1.3.1 and 2.3), relabelled canonically.

Indices are positions: node `k` is `nodes[k]`, allocation `i` is `allocations[i]`, so equal blocks anywhere in any model
are equal values and have equal hashes.

Counted are what the block's nodes create, the gradient of the block's output, which arrives before the first backward
node (`incoming`), and workspace. Parameters, shared values, the block's own input `x_b`, and gradients that other
blocks keep are resident outside and do not appear here at all.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class BlockNode:
    """A compute node (cNode).

    Attributes:
        name: for people: operation and module.
        time_s: mean time of one execution, seconds.
        workspace_bytes: peak bytes while it runs, above its inputs and everything it creates.
        reads: allocations that must be complete and in memory while it runs (never its own outputs), ascending.
        creates: allocations that it fills, ascending; each is created by exactly one node. All are in memory from its
            start; those nobody needs are freed right after it.
        once: may be executed only once (it updates a parameter or a buffer, or computes the loss).
    """

    name: str
    time_s: float
    workspace_bytes: int
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    once: bool = False


@dataclass(frozen=True)
class BlockAllocation:
    """An allocation node (aNode): one storage."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class BlockGraph:
    """The forward and backward compute nodes of one block, in topological order.

    Attributes:
        nodes: forward nodes, then backward nodes.
        forward_count: number of forward nodes; the papers' loss node sits just before `nodes[forward_count]`.
        allocations: everything counted.
        output: allocations that the next block reads (`x_{b+1}`): created in forward, in memory at the loss.
        incoming: gradients of the output: appear at the loss, in memory until their last use in backward. No node
            creates them.
        outgoing: in memory at the end: the gradient of the block's input and gradients that stay.
    """

    nodes: tuple[BlockNode, ...]
    forward_count: int
    allocations: tuple[BlockAllocation, ...]
    output: tuple[int, ...]
    incoming: tuple[int, ...]
    outgoing: tuple[int, ...]

    @cached_property
    def on_last_run(self) -> BlockGraph:
        """The block on its last run: nobody needs its output, and what forward nodes only do has happened."""
        nodes = tuple(
            replace(n, time_s=0.0, workspace_bytes=0) if k < self.forward_count and n.once and not n.creates else n
            for k, n in enumerate(self.nodes)
        )
        return replace(self, nodes=nodes, output=())

    def creator(self) -> dict[int, int]:
        """Return the node that creates each allocation; incoming gradients have none."""
        return {a: k for k, node in enumerate(self.nodes) for a in node.creates}

    def readers(self) -> dict[int, list[int]]:
        """Return the nodes that read each allocation, ascending."""
        found: dict[int, list[int]] = {a: [] for a in range(len(self.allocations))}
        for k, node in enumerate(self.nodes):
            for a in node.reads:
                found[a].append(k)
        return found

    def to_json(self) -> str:
        """Return the block as canonical JSON; it has the names, which `content_hash` ignores."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> BlockGraph:
        """Read a block from the text that `to_json` made."""
        raw = json.loads(text)
        nodes = tuple(
            BlockNode(n["name"], n["time_s"], n["workspace_bytes"], tuple(n["reads"]), tuple(n["creates"]), n["once"])
            for n in raw["nodes"]
        )
        return BlockGraph(
            nodes=nodes,
            forward_count=raw["forward_count"],
            allocations=tuple(BlockAllocation(a["name"], a["nbytes"]) for a in raw["allocations"]),
            output=tuple(raw["output"]),
            incoming=tuple(raw["incoming"]),
            outgoing=tuple(raw["outgoing"]),
        )

    def content_hash(self) -> str:
        """Hash structure, bytes and times: equal for identical blocks (thesis 2.3), whatever their names."""
        content = {
            "nodes": [(n.time_s, n.workspace_bytes, n.reads, n.creates, n.once) for n in self.nodes],
            "forward_count": self.forward_count,
            "bytes": [a.nbytes for a in self.allocations],
            "boundary": [self.output, self.incoming, self.outgoing],
        }
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Action:
    """One row of a block's schedule: compute a node or free an allocation."""

    kind: Literal["compute", "free"]
    index: int


@dataclass(frozen=True)
class BlockSchedule:
    """The schedule that a solver returns: forward actions, then (after the rest of the chain has run) backward actions.

    Whatever is in memory when `forward` ends is kept until `backward` starts. When `backward` ends exactly the block's
    `outgoing` allocations are in memory.
    """

    forward: tuple[Action, ...]
    backward: tuple[Action, ...]


@dataclass(frozen=True)
class SolveReport:
    """Says how a schedule was found.

    Attributes:
        formulation: the file's name in `formulations`.
        status: "optimal", "feasible" (time limit) or "heuristic".
        objective_s: total compute time of the schedule, seconds.
        bound_s: proven lower bound on that time for the same budgets, seconds.
    """

    formulation: str
    status: Literal["optimal", "feasible", "heuristic"]
    objective_s: float
    bound_s: float

    @staticmethod
    def of_solver(formulation: str, status: str, objective_s: float, bound_s: float) -> SolveReport:
        """Return what a solver has proven, where whatever it cannot prove optimal is feasible."""
        return SolveReport.bounded(formulation, "optimal" if status == "optimal" else "feasible", objective_s, bound_s)

    @staticmethod
    def bounded(
        formulation: str, status: Literal["optimal", "feasible", "heuristic"], objective_s: float, bound_s: float
    ) -> SolveReport:
        """Return a report whose bound is never below zero or above the time that was found."""
        return SolveReport(formulation, status, objective_s, min(max(0.0, bound_s), objective_s))

    @property
    def gap(self) -> float:
        """Return (objective − bound) / objective, 0 when proven optimal."""
        return 0.0 if self.objective_s <= 0 else max(0.0, (self.objective_s - self.bound_s) / self.objective_s)
