"""The recursion of TW-Remat, which orders the executions of nodes for one limit of memory.

`solve.py` has the paper, the symbols, and the differences from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stowage.stages.formulations.block.staged_order import StagedGraph
from stowage.stages.formulations.block.tw_remat.trees import TreeDecomposition, decompose

# Largest share of the nodes in one part.
_LARGEST = 2 / 3


class TooLongError(Exception):
    """The order became longer than allowed."""


@dataclass(frozen=True)
class NodeGraph:
    """A block as nodes that read nodes, the loss among them, with its tree decomposition.

    Attributes:
        staged: the block.
        reads: for each node those whose results it reads, ascending.
        readers: for each node those that read its results, ascending.
        size: bytes of what each node creates.
        tree: decomposition of the moral graph.
    """

    staged: StagedGraph
    reads: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    size: tuple[int, ...]
    tree: TreeDecomposition

    @staticmethod
    def of(staged: StagedGraph) -> NodeGraph:
        """Replace allocations by the nodes that create them."""
        creator = staged.creator
        reads = tuple(tuple(sorted({creator[a] for a in node.reads})) for node in staged.nodes)
        readers: list[list[int]] = [[] for _ in reads]
        for node, read in enumerate(reads):
            for p in read:
                readers[p].append(node)
        size = tuple(sum(staged.nbytes[a] for a in node.creates) for node in staged.nodes)
        return NodeGraph(staged, reads, tuple(map(tuple, readers)), size, decompose(reads))


@dataclass
class TreewidthOrder:
    """One run of the recursion, with the executions it has made so far.

    Attributes:
        graph: the block to order.
        straight_bytes: W; nodes that take no more memory when they run one after the other are not split up.
        kept: nodes that run once, like `once` and backward nodes, and whose results stay while they are needed.
        longest: the most executions.
        order: executions so far.
    """

    graph: NodeGraph
    straight_bytes: int
    kept: frozenset[int] = frozenset()
    longest: int = 1_000_000
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        nodes, loss = self.graph.staged.nodes, self.graph.staged.loss
        self._single = [node.once or k >= loss or k in self.kept for k, node in enumerate(nodes)]
        self._in_use: Counter[int] = Counter()
        # First runs are in ascending order; this is the next node to run for the first time.
        self._first = 0

    def everything(self) -> list[int]:
        """Return executions after which every node has run.

        Raises:
            TooLongError: there would be more than `longest`.
        """
        count = len(self.graph.reads)
        self._make(range(len(self.graph.tree.bags)), range(count), (), count)
        return self.order

    def _make(self, tree: Sequence[int], inside: Sequence[int], targets: Collection[int], limit: int) -> None:
        """Run the nodes of `inside` before `limit` that have not run, and put the results of `targets` in memory.

        Args:
            tree: bags with all nodes of `inside`, connected.
            inside: nodes, ascending; what they read outside is in memory.
            targets: some of the nodes of `inside`.
            limit: number of a node.
        """
        todo = self._closure(inside, targets, limit)
        straight = self._straight(todo, targets)
        if len(todo) <= 1 or self._peak_of(straight, targets) <= self.straight_bytes:
            self._run(straight)
            return
        bag = self.graph.tree.separator(tree, todo, self.graph.size, _LARGEST)
        trees, part_of = self.graph.tree.without(tree, bag)
        separator = [k for k in todo if k in self.graph.tree.bags[bag]]
        parts: list[list[int]] = [[] for _ in trees]
        place: dict[int, int] = {}
        for k in todo:
            if k not in self.graph.tree.bags[bag]:
                place[k] = part_of[self.graph.tree.bag_of[k]]
                parts[place[k]].append(k)
        last_reader = {p: s for s in separator for p in self.graph.reads[s] if p in place}
        expiring: dict[int, list[int]] = {}
        staying = list(separator)
        for s in separator:
            read: dict[int, set[int]] = {}
            for p in self.graph.reads[s]:
                if p in place and not self._available(p):
                    read.setdefault(place[p], set()).add(p)
            for number in self._next(parts, read, s):
                wanted = read.get(number, set())
                # What later nodes of the separator read, and is made now anyway, stays until then.
                made = self._closure(parts[number], wanted, s)
                wanted.update(k for k in made if last_reader.get(k, -1) > s)
                self._make(trees[number], parts[number], wanted, s)
                for k in wanted:
                    self._in_use[k] += 1
                    expiring.setdefault(last_reader[k], []).append(k)
            self._run([s])
            self._in_use[s] += 1
            for k in expiring.pop(s, ()):
                self._in_use[k] -= 1
        asked: dict[int, set[int]] = {}
        for k in targets:
            if k in place:
                asked.setdefault(place[k], set()).add(k)
        for number in self._next(parts, asked, limit):
            wanted = asked.get(number, set())
            self._make(trees[number], parts[number], wanted, limit)
            self._in_use.update(wanted)
            staying.extend(wanted)
        self._in_use.subtract(staying)

    def _run(self, nodes: Iterable[int]) -> None:
        """Run nodes, ascending, and before a first run all first runs of lower nodes.

        So random numbers are drawn as without recomputation, and parameters change when no later node can need the old
        ones.
        """
        for k in nodes:
            if k >= self._first:
                self.order.extend(range(self._first, k + 1))
                self._first = k + 1
            elif not self._single[k]:
                self.order.append(k)
        if len(self.order) > self.longest:
            raise TooLongError

    def _available(self, k: int) -> bool:
        """Return whether the result of `k` is in memory by decision, not by chance."""
        return self._in_use[k] > 0 or (self._single[k] and k < self._first)

    def _closure(self, inside: Sequence[int], targets: Iterable[int], limit: int) -> list[int]:
        """Return the nodes of `inside` that must run for `targets` and for all first runs before `limit`, ascending."""
        members = set(inside)
        stack = [k for k in targets if not self._available(k)]
        stack += [k for k in inside if self._first <= k < limit]
        found = set(stack)
        while stack:
            for p in self.graph.reads[stack.pop()]:
                if p in members and p not in found and not self._available(p):
                    found.add(p)
                    stack.append(p)
        return sorted(found)

    def _next(self, parts: Sequence[Sequence[int]], read: Mapping[int, Collection[int]], limit: int) -> list[int]:
        """Return the parts with something to do, by their next first run."""
        first = {n: next((k for k in part if self._first <= k < limit), limit) for n, part in enumerate(parts)}
        return sorted((n for n in first if n in read or first[n] < limit), key=lambda n: (first[n], n))

    def _straight(self, todo: Sequence[int], targets: Collection[int]) -> list[int]:
        """Return `todo` in the order of a plain run: ascending, with repeated nodes right before they are needed."""
        again = {k for k in todo if k < self._first}
        order: list[int] = []
        for k in (*(k for k in todo if k not in again), *sorted(again.intersection(targets))):
            stack, found = [k], {k}
            while stack:
                for p in self.graph.reads[stack.pop()]:
                    if p in again and p not in found:
                        found.add(p)
                        stack.append(p)
            if k in again or k >= self._first:
                again -= found
                order.extend(sorted(found))
        return order

    def _peak_of(self, order: Sequence[int], targets: Collection[int]) -> int:
        """Return the peak bytes of running nodes in this order, counting only what they make."""
        graph, last_use = self.graph, dict.fromkeys(order, -1)
        for position, k in enumerate(order):
            for p in graph.reads[k]:
                if p in last_use:
                    last_use[p] = position
        dying: dict[int, int] = {}
        peak, used = 0, 0
        for position, k in enumerate(order):
            stays = k in targets or (
                self._single[k] and any(r not in last_use and r >= self._first for r in graph.readers[k])
            )
            if not stays:
                end = max(last_use[k], position)
                dying[end] = dying.get(end, 0) + graph.size[k]
            used += graph.size[k]
            peak = max(peak, used + graph.staged.nodes[k].workspace_bytes)
            used -= dying.pop(position, 0)
        return peak
