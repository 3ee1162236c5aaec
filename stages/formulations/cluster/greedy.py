"""Grows a choice of `lazy.py` until both budgets hold, at the least time per byte; then undoes what was too much.

The result is deterministic; times are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stowage.stages.formulations.cluster.lazy import HCandidate, HChoice, candidate_of, repeatable
from stowage.stages.formulations.cluster.problem import ClusterWay, HProblem

_MOST_PASSES = 200


@dataclass(frozen=True)
class _Move:
    """A change of a choice.

    Attributes:
        seconds: estimated seconds more.
        nbytes: bytes less where a budget is exceeded.
        length: number of events for which they are less.
        choice: the choice after it.
    """

    seconds: float
    nbytes: int
    length: int
    choice: HChoice

    def price(self, foresight: float, excess: int) -> float:
        """Return the seconds per useful byte; with foresight also per event."""
        weight: float = self.length**foresight
        return (self.seconds + 1e-12) / (min(self.nbytes, excess) * weight)


def relieve(
    data: HProblem, start: HCandidate, peak_bytes: int, save_bytes: int, foresight: float = 0.0
) -> HCandidate | None:
    """Return a candidate within both budgets that grows out of `start`, or None where the rule finds none.

    Args:
        data: the problem.
        start: the candidate to begin with.
        peak_bytes: M_peak.
        save_bytes: M_save.
        foresight: 0 prices bytes at the moment of the excess; 1 multiplies by the events for which they are free.
    """
    current, seen = start, {start.choice}
    for _ in range(_MOST_PASSES):
        if current.cost.within(peak_bytes, save_bytes):
            return current
        where, excess = current.cost.peak_event, current.cost.peak_bytes - peak_bytes
        if excess <= 0:
            where = next(e for e, event in enumerate(current.events) if event.node == data.graph.loss)
            excess = current.cost.save_bytes - save_bytes
        moves = [move for move in _moves(data, current, where) if move.nbytes > 0 and move.choice not in seen]
        if not moves:
            return None
        best = min(moves, key=lambda move: (move.price(foresight, excess), -move.nbytes))
        seen.add(best.choice)
        current = candidate_of(data, best.choice)
    return None


def polish(data: HProblem, found: HCandidate, peak_bytes: int, save_bytes: int, tries: int) -> HCandidate:
    """Undo single decisions, the most expensive first, as long as the budgets hold and time is saved."""
    for _ in range(2):
        before = found
        for choice in list(_undone(data, found))[:tries]:
            merged = _merge(found.choice, before.choice, choice)
            if merged is None:
                continue
            trial = candidate_of(data, merged)
            if trial.cost.within(peak_bytes, save_bytes) and trial.cost.time_s < found.cost.time_s:
                found = trial
        if found is before:
            break
    return found


def _moves(data: HProblem, current: HCandidate, where: int) -> Iterator[_Move]:
    """Yield changes that would free bytes at event `where`."""
    yield from _smaller_options(data, current, where)
    yield from _phantoms_dropped(data, current, where)
    yield from _values_cut(data, current, where)


def _smaller_options(data: HProblem, current: HCandidate, where: int) -> Iterator[_Move]:
    """Yield changes of option: a smaller phantom across `where`, or less memory while one of its nodes runs there."""
    event = current.events[where]
    spans = _phantom_spans(data, current)
    for j, cluster in enumerate(data.graph.clusters):
        o = current.choice.options[j]
        first, last = spans[j]
        across, here = first < where < last, data.cluster_of.get(event.node) == j and event.way.option == o
        if not across and not here:
            continue
        for other in range(len(cluster.options)):
            if other == o:
                continue
            one, two = cluster.options[o], cluster.options[other]
            if across:
                saved = one.phantom_bytes - two.phantom_bytes
            else:
                new = next(way for way in data.ways[event.node] if way.option == other)
                saved = _most(event.way) - _most(new)
            seconds = two.forward.time_s + two.backward.time_s - one.forward.time_s - one.backward.time_s
            options = tuple(other if i == j else was for i, was in enumerate(current.choice.options))
            yield _Move(max(seconds, 0.0), saved, max(1, last - first), replace(current.choice, options=options))


def _phantoms_dropped(data: HProblem, current: HCandidate, where: int) -> Iterator[_Move]:
    """Yield changes that fast-forward first, and run forward again for backward."""
    spans = _phantom_spans(data, current)
    for j, cluster in enumerate(data.graph.clusters):
        first, last = spans[j]
        if j in current.choice.dropped or not first < where < last or not repeatable(data, cluster.forward):
            continue
        plain = data.graph.nodes[cluster.forward].plain
        seconds = _seconds_again(data, current, cluster.forward, cluster.backward) if plain else 0.0
        nbytes = cluster.options[current.choice.options[j]].phantom_bytes
        yield _Move(seconds, nbytes, last - first, replace(current.choice, dropped=current.choice.dropped | {j}))


def _values_cut(data: HProblem, current: HCandidate, where: int) -> Iterator[_Move]:
    """Yield cuts of a forward node's values that are in memory unused across `where`."""
    stretches: dict[tuple[int, int, int], int] = {}
    last: dict[int, int] = {}
    for e, event in enumerate(current.events):
        for d in event.way.reads:
            k, before = data.contributors[d][0], last[d]
            if before < where < e and repeatable(data, k) and current.events[before].stage < event.stage:
                key = (k, before, e)
                stretches[key] = stretches.get(key, 0) + data.nbytes[d]
            last[d] = e
        for d in data.graph.nodes[event.node].makes:
            last[d] = e
    for (k, before, after), nbytes in stretches.items():
        if len(current.runs[k]) > 4:
            continue
        cut = (k, current.events[before].stage)
        seconds = _seconds_again(data, current, k, current.events[after].stage)
        yield _Move(seconds, nbytes, after - before, replace(current.choice, cuts=current.choice.cuts | {cut}))


def _most(way: ClusterWay) -> int:
    return max(step.internal_bytes for step in way.steps)


def _phantom_spans(data: HProblem, current: HCandidate) -> list[tuple[int, int]]:
    """Return, for each cluster, the events that make and that take its phantom."""
    spans = [(0, 0)] * len(data.graph.clusters)
    for e, event in enumerate(current.events):
        j = data.cluster_of.get(event.node)
        if j is not None and event.way.option is not None:
            spans[j] = (e, e) if event.node in data.forward_of else (spans[j][0], e)
    return spans


def _seconds_again(data: HProblem, current: HCandidate, node: int, stage: int) -> float:
    """Return the time to run a forward node again in a stage, with its ancestors that are not in memory by then."""
    last_use: dict[int, int] = {}
    for event in current.events:
        for d in event.way.reads:
            last_use[d] = event.stage
    total, seen, stack = 0.0, {node}, [node]
    while stack and len(seen) < 64:
        k = stack.pop()
        total += min(way.time_s for way in data.ways[k])
        for d in data.graph.nodes[k].reads:
            c = data.contributors[d][0]
            if c not in seen and last_use.get(d, -1) < stage and c < data.graph.loss:
                seen.add(c)
                stack.append(c)
    return total


def _undone(data: HProblem, found: HCandidate) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield single decisions that could be undone, the most expensive first."""
    priced: list[tuple[float, str, tuple[int, int]]] = []
    for j, cluster in enumerate(data.graph.clusters):
        times = [o.forward.time_s + o.backward.time_s for o in cluster.options]
        now = times[found.choice.options[j]]
        priced.extend((now - t, "option", (j, o)) for o, t in enumerate(times) if t < now)
        if j in found.choice.dropped:
            plain = data.graph.nodes[cluster.forward].plain
            priced.append((plain.time_s if plain else 0.0, "drop", (j, 0)))
    for k, stage in found.choice.cuts:
        priced.append((min(way.time_s for way in data.ways[k]), "cut", (k, stage)))
    for _, kind, what in sorted(priced, key=lambda p: (-p[0], p[1], p[2])):
        yield kind, what


def _merge(now: HChoice, before: HChoice, undo: tuple[str, tuple[int, int]]) -> HChoice | None:
    """Return the choice with one decision undone, or None if that has happened already."""
    kind, (a, b) = undo
    if kind == "option":
        if now.options[a] != before.options[a]:
            return None
        return replace(now, options=tuple(b if j == a else o for j, o in enumerate(now.options)))
    if kind == "drop":
        return replace(now, dropped=now.dropped - {a}) if a in now.dropped else None
    return replace(now, cuts=now.cuts - {(a, b)}) if (a, b) in now.cuts else None
