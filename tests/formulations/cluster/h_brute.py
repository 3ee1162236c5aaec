"""Exhaustive search for the fastest schedule of a tiny H-Graph over the staged order. Shares no code with the
formulations.

`backward_once`: backward nodes and nodes that share a value with other contributors run once, as with retention
intervals.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from stowage.stages.ir.h_graph import HGraph, HRun

State = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""Contributions in each value as bits, option of each cluster's phantom (−1: none), stage, next node in the stage."""


def fastest_h(graph: HGraph, peak: int, save: int, *, backward_once: bool = False) -> float | None:
    """Least total time within both budgets, or None where nothing fits."""
    search = _Search(graph, peak, save, backward_once)
    start: State = ((0,) * len(graph.values), (-1,) * len(graph.clusters), 0, 0)
    best: dict[State, float] = {start: 0.0}
    queue: list[tuple[float, State]] = [(0.0, start)]
    while queue:
        time_s, state = heapq.heappop(queue)
        if best[state] < time_s:
            continue
        if search.done(state):
            return time_s
        for extra, following in search.transfers(state):
            total = time_s + extra
            if total < best.get(following, float("inf")):
                best[following] = total
                heapq.heappush(queue, (total, following))
    return None


class _Search:
    def __init__(self, graph: HGraph, peak: int, save: int, backward_once: bool) -> None:
        self.graph, self.peak, self.save = graph, peak, save
        self.full = [sum(1 << k for k, n in enumerate(graph.nodes) if d in n.makes) for d in range(len(graph.values))]
        self.once = {k for k, n in enumerate(graph.nodes) if n.once} | {graph.loss}
        if backward_once:
            self.once |= set(range(graph.loss, len(graph.nodes)))
            shared = {d for d, bits in enumerate(self.full) if bits.bit_count() > 1}
            self.once |= {k for k, n in enumerate(graph.nodes) if shared & set(n.makes)}
        self.forward = {c.forward: j for j, c in enumerate(graph.clusters)}
        self.backward = {c.backward: j for j, c in enumerate(graph.clusters)}

    def held(self, values: tuple[int, ...], phantoms: tuple[int, ...]) -> int:
        total = sum(v.nbytes for v, bits in zip(self.graph.values, values) if bits)
        return total + sum(c.options[o].phantom_bytes for c, o in zip(self.graph.clusters, phantoms) if o >= 0)

    def done(self, state: State) -> bool:
        values, phantoms, stage, _ = state
        goal = tuple(bits if d in self.graph.final else 0 for d, bits in enumerate(self.full))
        return stage == len(self.graph.nodes) and values == goal and set(phantoms) <= {-1}

    def transfers(self, state: State) -> Iterator[tuple[float, State]]:
        values, phantoms, stage, k = state
        if stage == len(self.graph.nodes):
            return
        if k < stage:
            yield 0.0, (values, phantoms, stage, k + 1)
            if k in self.once:
                return
        after = (stage + 1, 0) if k == stage else (stage, k + 1)
        node = self.graph.nodes[k]
        if any(values[d] >> k & 1 for d in node.makes):
            return
        if k == self.graph.loss and self.held(values, phantoms) > self.save:
            return
        for option, run in self.graph.runs(k).items():
            reads = {*node.reads, *run.reads}
            if any(values[d] != self.full[d] for d in reads):
                continue
            j = self.forward.get(k, self.backward.get(k, -1))
            if k in self.forward and option is not None and phantoms[j] >= 0:
                continue
            if k in self.backward and phantoms[j] != option:
                continue
            made = tuple(bits | (1 << k if d in node.makes else 0) for d, bits in enumerate(values))
            left = phantoms
            if k in self.forward and option is not None:
                left = (*phantoms[:j], option, *phantoms[j + 1 :])
            touched = sorted({*reads, *node.makes})
            for gone in itertools.product((False, True), repeat=len(touched)):
                freed = {d for d, out in zip(touched, gone) if out}
                rest = tuple(0 if d in freed else bits for d, bits in enumerate(made))
                for drop in (False, True) if j >= 0 and option is not None else (False,):
                    ends = (*left[:j], -1, *left[j + 1 :]) if drop else left
                    most = self.highest(values, phantoms, k, run, freed, drop, touched)
                    if max(most, self.held(rest, ends)) <= self.peak:
                        yield run.time_s, (rest, ends, *after)

    def highest(
        self,
        values: tuple[int, ...],
        phantoms: tuple[int, ...],
        k: int,
        run: HRun,
        freed: set[int],
        drop: bool,
        touched: list[int],
    ) -> int:
        own = self.backward.get(k)
        aside = self.held(
            tuple(0 if d in touched else bits for d, bits in enumerate(values)),
            tuple(-1 if j == own else o for j, o in enumerate(phantoms)),
        )
        found = 0
        for step in run.steps:
            now = aside + step.internal_bytes
            if own is not None and not drop:
                now += step.phantom_released_bytes
            for d in touched:
                absent = (d in step.unborn and not values[d]) or (d in step.released and d in freed)
                now += 0 if absent else self.graph.values[d].nbytes
            found = max(found, now)
        return found
