"""H-Partition (Zhao, thesis 3.3, Algorithm 7): a forward graph as a hierarchy of small graphs.

The score of a cluster C (equation 3.1), which the greedy algorithm takes smallest first:

    s(C) = (bytes of values that cross C's border, each once) · (nodes of the forward graph in C) ^ α

Symbols: M^t, `top_size`: most members of the top; M^l, `size`: most members of every other cluster; α, `alpha`.

Differences from the thesis:

- Time. The thesis needs O(N² log N). Here candidates come from bounded walks (`candidates`), scores from borders of
  groups (`level`), and a candidate is evaluated again only when its nodes change (`merge`): O(N log N) for fixed M^l.
- Graphs on which Algorithm 7 stops. In a decoder that reads an encoder, or a deep U-Net, nearly every a(x) is far
  away: the algorithm finds few candidates per level, makes a level for each handful of nodes, or none at all and no
  end. A level that keeps more than `STALLED_SHARE` of its nodes goes on with pairs of groups that follow each other
  in a topological order, until every such pair is too large. Each level is then a constant factor smaller than the
  one before.
- Sources. Nodes that depend on nothing that enters start in a group with their first reader (`apart`).
- Where the two additions change something, the partition without them is made as well, and `partition_score` decides.
  So the result is never worse than Algorithm 7's, wherever that ends within `MOST_LEVELS` levels of the first one's
  size.
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.defaults import ALPHA, CLUSTER_SIZE, TOP_SIZE
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.hierarchy import FlowGraph, Hierarchy
from stowage.stages.partition.clusters.apart import Start, as_it_is, with_first_readers
from stowage.stages.partition.clusters.candidates import dominated, neighbours
from stowage.stages.partition.clusters.describe import Groups, describe
from stowage.stages.partition.clusters.level import first_level
from stowage.stages.partition.clusters.merge import Candidates

STALLED_SHARE = 0.5
"""Share of its nodes above which a level with more groups is continued with neighbours."""

MOST_LEVELS = 4
"""Algorithm 7 alone is abandoned when its levels have this many times the nodes and reads of the first one."""


@dataclass(frozen=True)
class Limits:
    """Sizes of clusters.

    Attributes:
        top_size: M^t, the most members of the top.
        size: M^l, the most members of any other cluster.
        alpha: exponent of the number of nodes in equation 3.1.
        smallest: a graph with fewer nodes is not partitioned.
    """

    top_size: int = TOP_SIZE
    size: int = CLUSTER_SIZE
    alpha: float = ALPHA
    smallest: int = 4

    def __post_init__(self) -> None:
        if self.size < 2 or self.top_size < 1 or not self.alpha >= 0:
            raise ParameterError(
                f"Clusters need a size of 2 at least, a top of 1 and an alpha of 0, not {self.size}, {self.top_size} "
                f"and {self.alpha}."
            )


@dataclass
class _Grown:
    """A partition: the groups of each level, whether neighbours were needed, and the sum of scores."""

    order: list[int]
    levels: list[Groups]
    helped: bool
    score: float


def h_partition(graph: FlowGraph, limits: Limits | None = None) -> Hierarchy:
    """Partition a forward graph recursively.

    Raises:
        TableError: the graph is malformed.
    """
    limits = limits or Limits()
    graph.check()
    power = [float(n**limits.alpha) for n in range(len(graph.nodes) + 1)]
    start = with_first_readers(graph, limits.size)
    best = _grow(graph, start, limits, power)
    assert best is not None
    if best.helped or start.units or start.order != list(range(len(graph.nodes))):
        best = _grow(graph, as_it_is(graph), limits, power, below=best.score) or best
    return describe(graph, best.order, best.levels, power)


def partition_score(hierarchy: Hierarchy) -> float:
    """Return equation 3.1, summed over all clusters but the top: the score of the whole partition."""
    return sum(c.score for c in hierarchy.clusters[:-1])


def _grow(
    graph: FlowGraph, start: Start, limits: Limits, power: list[float], *, below: float | None = None
) -> _Grown | None:
    """Add levels until the last has M^t nodes.

    With `below` run Algorithm 7 alone, and return None if it stops, takes too many levels, or does not get below that
    score.
    """
    plain = below is not None
    level = first_level(graph, start.order, start.after)
    for unit in start.units:
        level.merge(unit)
    grown = _Grown(list(start.order), [], False, 0.0)
    enough = max(limits.top_size, limits.smallest - 1)
    patience = MOST_LEVELS * (level.count + sum(len(r) for r in level.reads))
    while len(level.members) > enough:
        before = len(level.members)
        patience -= before + sum(len(r) for r in level.reads)
        Candidates(level, dominated(level, limits.size), limits.size, power).merge_all(enough)
        if plain and (level.count == before or patience < 0):
            return None
        if not plain and level.count > max(enough, STALLED_SHARE * before):
            grown.helped = True
            Candidates(level, neighbours(level, limits.size), limits.size, power).merge_all(enough)
        for group in level.groups():
            if len(level.members[group]) > 1:
                grown.score += level.interface_bytes((group,)) * power[level.weight[group]]
        if below is not None and grown.score >= below:
            return None
        level, groups = level.contract()
        grown.levels.append(groups)
    return grown
