"""A forward graph and its recursive partition into clusters (H-Clusters, thesis 3.2.1).

Nodes and clusters share one numbering, as *members*: `0 … N - 1` are the nodes of the graph, `N + c` is cluster `c`.
The last cluster is the top, which contains everything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from stowage.stages.ir.errors import TableError


class FlowNode(NamedTuple):
    """One forward computation.

    Attributes:
        reads: values that it needs.
        creates: values that it makes.
        key: what it computes; nodes with equal keys do the same work on inputs of the same sizes.
        after: nodes that must run before it although it reads nothing of theirs (order of random draws).
        enters: depends on the batch in a way that `reads` does not say, since the batch is in memory anyway.
    """

    reads: tuple[int, ...]
    creates: tuple[int, ...]
    key: str
    after: tuple[int, ...] = ()
    enters: bool = False


@dataclass(frozen=True)
class FlowGraph:
    """A forward graph, its nodes in a topological order.

    Attributes:
        nodes: the computations, by number.
        value_bytes: bytes of each value. A value that no node makes enters from outside.
        results: values that are needed after the last node (the loss).
    """

    nodes: Sequence[FlowNode]
    value_bytes: Sequence[int]
    results: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise `TableError` unless values are made once and before they are read."""
        made = [v for node in self.nodes for v in node.creates]
        everything = chain(made, self.results, (v for node in self.nodes for v in node.reads))
        if any(not 0 <= v < len(self.value_bytes) for v in everything) or len(set(made)) != len(made):
            raise TableError("The forward graph names a value that does not exist, or one that two nodes make.")
        later = set(made)
        for number, node in enumerate(self.nodes):
            if not later.isdisjoint(node.reads) or any(not 0 <= n < number for n in node.after):
                raise TableError(f"Node {number} of the forward graph needs something that comes after it.")
            later.difference_update(node.creates)


@dataclass(frozen=True)
class Cluster:
    """A convex set of nodes, as a small graph of members: nodes and smaller clusters.

    Attributes:
        cluster: position in the table; clusters inside come before it, the top is last.
        parent: the cluster that contains it, -1 for the top.
        level: 1 for a cluster of nodes alone, else 1 more than the highest inside.
        children: members in topological order.
        inputs: values read inside and made outside, in the order of first use.
        outputs: values made inside and read outside or needed at the end, in the order in which they are made.
        node_count: nodes inside, at every depth.
        interface_bytes: bytes of `inputs` and `outputs`, each once.
        score: equation 3.1.
        cluster_hash: equal for clusters that do the same work in the same order on the same sizes (thesis 3.3.5).
    """

    cluster: int
    parent: int
    level: int
    children: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    node_count: int
    interface_bytes: int
    score: float
    cluster_hash: str


@dataclass(frozen=True)
class BlockCluster:
    """A cluster of the forward nodes of a block, as a row of a table; `Cluster` explains the other attributes.

    Attributes:
        block_hash: the block, or all that are identical.
        children: nodes by position in the block, and clusters: cluster c is number of forward nodes + c.
        variant: the rewrite of the trace that the block belongs to.
    """

    block_hash: str
    cluster: int
    parent: int
    level: int
    children: tuple[int, ...]
    node_count: int
    interface_bytes: int
    score: float
    cluster_hash: str
    variant: str = "plain"


class ClusterNode(NamedTuple):
    """A child inside a `ClusterGraph`, whose values are positions there.

    Attributes:
        member: the node or cluster.
        key: its key or hash: equal children have equal options.
        reads: values it needs from outside itself; for a cluster in the order of its `inputs`.
        creates: values it leaves for others; for a cluster in the order of its `outputs`.
    """

    member: int
    key: str
    reads: tuple[int, ...]
    creates: tuple[int, ...]


@dataclass(frozen=True)
class ClusterGraph:
    """One cluster as a solver sees it (the forward half of an H-Graph), relabelled canonically.

    Attributes:
        children: the children, in topological order.
        values: the value of the forward graph at each position: inputs in the order of first use, then what children
            create, in order. What happens inside a child cluster does not appear.
        value_bytes: bytes of each value, by position.
        inputs, outputs: positions that come from outside, and that are needed outside.
    """

    children: tuple[ClusterNode, ...]
    values: tuple[int, ...]
    value_bytes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def content_hash(self) -> str:
        """Hash children, wiring and bytes, without names of nodes and values."""
        content = (
            [(c.key, c.reads, c.creates) for c in self.children],
            self.value_bytes,
            len(self.inputs),
            self.outputs,
        )
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:20]


def wire(members: Sequence[ClusterNode], needed: Iterable[int], value_bytes: Sequence[int]) -> ClusterGraph:
    """Build the graph of some members.

    Args:
        members: in topological order, with values of the forward graph in `reads` and `creates`.
        needed: values that others need.
        value_bytes: bytes of each value of the forward graph.
    """
    made = {v for m in members for v in m.creates}
    inputs = list(dict.fromkeys(v for m in members for v in m.reads if v not in made))
    values = inputs + [v for m in members for v in m.creates]
    at = {v: i for i, v in enumerate(values)}
    children = (
        ClusterNode(m.member, m.key, tuple(at[v] for v in m.reads), tuple(at[v] for v in m.creates)) for m in members
    )
    return ClusterGraph(
        children=tuple(children),
        values=tuple(values),
        value_bytes=tuple(value_bytes[v] for v in values),
        inputs=tuple(range(len(inputs))),
        outputs=tuple(sorted(at[v] for v in needed)),
    )


@dataclass(frozen=True)
class Hierarchy:
    """A forward graph and its clusters."""

    graph: FlowGraph
    clusters: Sequence[Cluster]

    @property
    def top(self) -> Cluster:
        """Return the cluster that contains everything."""
        return self.clusters[-1]

    def member(self, number: int) -> ClusterNode:
        """Return a node or a cluster, with values of the forward graph."""
        count = len(self.graph.nodes)
        if number < count:
            node = self.graph.nodes[number]
            return ClusterNode(number, node.key, node.reads, node.creates)
        cluster = self.clusters[number - count]
        return ClusterNode(number, cluster.cluster_hash, cluster.inputs, cluster.outputs)

    def graph_of(self, cluster: Cluster) -> ClusterGraph:
        """Build one level of the hierarchy: the children of a cluster, and the values between them."""
        return wire([self.member(m) for m in cluster.children], cluster.outputs, self.graph.value_bytes)

    def nodes_of(self, cluster: Cluster) -> list[int]:
        """Return the forward graph's nodes inside a cluster, in an order in which they may run."""
        count = len(self.graph.nodes)
        found: list[int] = []
        stack = list(reversed(cluster.children))
        while stack:
            number = stack.pop()
            if number < count:
                found.append(number)
            else:
                stack.extend(reversed(self.clusters[number - count].children))
        return found
