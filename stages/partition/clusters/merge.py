"""Runs the inner loop of Algorithm 7: takes the best candidate, makes it a group, updates the others."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from stowage.stages.partition.clusters.level import Level

_Entry = tuple[float, int, int, int]
"""Score, first node, number of nodes and candidate: the order in which candidates are taken."""


class Candidates:
    """Merges unions of groups into groups, the best first.

    A candidate is kept as its groups. The cost of a merge is bounded by what it touches: each candidate grows or loses
    groups at most 2 M^l times before it is too large or one group, scores change only when nodes are added, and the
    heap drops stale entries when they outnumber the others.
    """

    def __init__(self, level: Level, found: Iterable[tuple[int, ...]], largest: int, power: list[float]) -> None:
        self.level, self.largest, self.power = level, largest, power
        self.groups: list[tuple[int, ...]] = []
        self.size: list[int] = []
        self.number: dict[tuple[int, ...], int] = {}
        self.where: dict[int, list[int]] = {}
        self.heap: list[_Entry] = []
        for groups in found:
            if groups in self.number:
                continue
            candidate = self.number[groups] = len(self.groups)
            self.groups.append(groups)
            self.size.append(sum(len(level.members[g]) for g in groups))
            for group in groups:
                self.where.setdefault(group, []).append(candidate)
            self.heap.append(self._entry(candidate))
        heapify(self.heap)

    def _entry(self, candidate: int) -> _Entry:
        groups, level = self.groups[candidate], self.level
        weight = sum(level.weight[g] for g in groups)
        score = level.interface_bytes(groups) * self.power[weight]
        return score, groups[0], self.size[candidate], candidate

    def merge_all(self, enough: int) -> None:
        """Merge until no candidate is left or the level has `enough` groups."""
        heap = self.heap
        while heap and self.level.count > enough:
            _, _, size, candidate = heappop(heap)
            groups = self.groups[candidate]
            if size != self.size[candidate] or not groups:
                continue
            self.level.merge(groups)
            self._update(groups)
            if len(heap) > 1000 and len(heap) > 3 * len(self.number):
                heap[:] = [e for e in heap if self.groups[e[3]] and self.size[e[3]] == e[2]]
                heapify(heap)

    def _update(self, merged: tuple[int, ...]) -> None:
        """Give the new group to every candidate that shares a group with it, or drop those that become too large."""
        leader, inside = merged[0], frozenset(merged)
        touched: list[tuple[int, tuple[int, ...]]] = []
        for candidate in sorted({c for g in merged for c in self.where.pop(g, ())}):
            groups = self.groups[candidate]
            if groups:
                del self.number[groups]
                touched.append((candidate, groups))
        kept = self.where[leader] = []
        for candidate, groups in touched:
            rest = [g for g in groups if g not in inside]
            size = len(self.level.members[leader]) + sum(len(self.level.members[g]) for g in rest)
            after = tuple(sorted([leader, *rest]))
            if not rest or size > self.largest or after in self.number:
                self.groups[candidate] = ()
                continue
            self.groups[candidate] = after
            self.number[after] = candidate
            kept.append(candidate)
            if size != self.size[candidate]:
                self.size[candidate] = size
                heappush(self.heap, self._entry(candidate))
