"""Greedy selective recomputation, for blocks of any size.

Three families of choices (`lazy.py` says what a choice is) are tried, and the best kept:

- *cheap first*: drop after forward the nodes that take the least time per byte, up to a growing number of bytes;
- *segments*: keep nothing but checkpoints after forward (√n checkpointing and its neighbours), with or without the
  nodes that are most expensive per byte;
- *relieve the peak* (`relief.py`): grow any of those until given budgets hold.

Everything is deterministic. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from stowage.stages.formulations.block.greedy.lazy import Candidate, Choice, candidate_of, drop_after_forward
from stowage.stages.formulations.block.greedy.relief import polish, relieve
from stowage.stages.formulations.block.staged_order import StagedGraph, schedule_of
from stowage.stages.ir import pareto
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport

# Above this many nodes fewer starts are tried.
_SMALL = 200
_FORESIGHTS = (0.0, 0.5, 1.0)


def selective(block: BlockGraph, peak_bytes: int, save_bytes: int) -> tuple[BlockSchedule | None, SolveReport | None]:
    """Find the fastest schedule within both budgets (`ir.block` says what they count); `(None, None)` if none fits."""
    graph = StagedGraph.of(block)
    found = best_within(graph, family(graph), peak_bytes, save_bytes)
    if found is None:
        return None, None
    return schedule_of(graph, found.line), report_of(graph, found)


def selective_frontier(block: BlockGraph, levels: int = 24) -> list[tuple[BlockSchedule, SolveReport]]:
    """Find schedules from plain PyTorch down to the least memory, slower as they get smaller, none dominated."""
    graph = StagedGraph.of(block)
    return [(schedule_of(graph, c.line), report_of(graph, c)) for c in frontier(graph, levels)]


def report_of(graph: StagedGraph, found: Candidate) -> SolveReport:
    """Make the report of a heuristic: its bound is the time of every node once."""
    return SolveReport("selective", "heuristic", found.cost.time_s, sum(node.time_s for node in graph.nodes))


def family(graph: StagedGraph) -> list[Candidate]:
    """Return plain PyTorch, cheap-first and segment candidates, none dominated."""
    choices: list[Choice] = [{}]
    choices.extend(drop_after_forward(graph, nodes) for nodes in _cheap_first(graph))
    choices.extend(drop_after_forward(graph, nodes) for nodes in _segments(graph))
    distinct = {tuple(sorted((k, tuple(c)) for k, c in choice.items())): choice for choice in choices}
    return undominated(candidate_of(graph, choice) for choice in distinct.values())


def best_within(graph: StagedGraph, starts: Sequence[Candidate], peak_bytes: int, save_bytes: int) -> Candidate | None:
    """Return the fastest candidate within both budgets, of `starts` and of those grown out of the most promising."""
    fitting = [c for c in starts if c.cost.within(peak_bytes, save_bytes)]
    best = min(fitting, key=_by_time, default=None)
    limit = best.cost.time_s if best else math.inf
    foresights = _FORESIGHTS if len(graph.nodes) <= _SMALL else _FORESIGHTS[:2]
    for start in _promising(starts, peak_bytes, save_bytes, limit):
        for foresight in foresights:
            grown = relieve(graph, start, peak_bytes, save_bytes, foresight=foresight)
            if grown is not None and (best is None or grown.cost.time_s < best.cost.time_s):
                best = grown
    if best is None:
        return None
    return polish(graph, best, peak_bytes, save_bytes, tries=max(4, 4_000 // len(graph.nodes)))


def frontier(graph: StagedGraph, levels: int) -> list[Candidate]:
    """Find candidates at `levels` peaks between plain PyTorch's and the smallest found, each as fast as possible."""
    starts = family(graph)
    plain = candidate_of(graph, {})
    found = list(starts)
    peak, save = plain.cost.peak_bytes, plain.cost.save_bytes
    floor = max(graph.nbytes[a] for node in graph.nodes for a in node.creates) if graph.nodes else 0
    previous: list[Candidate] = []
    for level in range(1, levels + 1):
        share = 1.0 - level / (levels + 1)
        limit = int(floor + (peak - floor) * share)
        grown = best_within(graph, [*starts, *previous], limit, save)
        if grown is None:
            break
        found.append(grown)
        previous = [grown]
    return undominated(found)


def undominated(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Drop candidates that another is no worse than in time, save and both peaks; the fastest comes first."""
    return pareto.undominated(sorted(candidates, key=_by_time), _no_worse)


def _no_worse(one: Candidate, two: Candidate) -> bool:
    a, b = one.cost, two.cost
    return (
        a.time_s <= b.time_s
        and a.save_bytes <= b.save_bytes
        and a.forward_peak_bytes <= b.forward_peak_bytes
        and a.backward_peak_bytes <= b.backward_peak_bytes
    )


def _by_time(c: Candidate) -> tuple[float, int, int]:
    return c.cost.time_s, c.cost.peak_bytes, c.cost.save_bytes


def _promising(starts: Sequence[Candidate], peak: int, save: int, limit: float) -> list[Candidate]:
    """Return starts worth growing: plain PyTorch, the slowest, and the fastest that are nearly small enough."""
    faster = [c for c in starts if c.cost.time_s < limit]
    if len(faster) <= 3:
        return faster
    near = sorted(
        faster,
        key=lambda c: (max(c.cost.peak_bytes - peak, 0) + max(c.cost.save_bytes - save, 0), c.cost.time_s),
    )
    chosen = [faster[0], faster[-1], *near[:2]]
    return list({id(c): c for c in chosen}.values())


def _cheap_first(graph: StagedGraph, steps: int = 32) -> list[list[int]]:
    """Return growing prefixes of the forward nodes by time per byte, in equal shares of the bytes."""
    prices = _prices(graph)
    order = sorted(prices, key=lambda k: (prices[k], k))
    sizes = [sum(graph.nbytes[a] for a in graph.nodes[k].creates) for k in order]
    total, reached, prefixes, last = sum(sizes), 0, [], -1
    for position, size in enumerate(sizes):
        reached += size
        step = reached * steps // max(total, 1)
        if step > last or len(order) <= steps:
            prefixes.append(order[: position + 1])
            last = step
    return prefixes


def _segments(graph: StagedGraph) -> list[list[int]]:
    """Return sets of forward nodes without checkpoints at cuts of forward, and without the most expensive per byte."""
    prices = _prices(graph)
    by_price = sorted(prices, key=lambda k: (-prices[k], k))
    crossing = _crossing(graph)
    counts = sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, round(math.sqrt(max(graph.loss, 1)))})
    found = []
    for count in counts:
        if count > max(1, graph.loss // 2):
            break
        checkpoints: set[int] = set()
        for position in _cut_positions(graph, crossing, count):
            checkpoints |= crossing[position]
        for share in (0.0, 0.1, 0.25, 0.5):
            dear = set(by_price[: int(len(by_price) * share)])
            found.append([k for k in prices if k not in checkpoints and k not in dear])
    return found


def _prices(graph: StagedGraph) -> dict[int, float]:
    """Return seconds per byte made, for forward nodes that may run again."""
    return {
        k: node.time_s / max(1, sum(graph.nbytes[a] for a in node.creates))
        for k, node in enumerate(graph.nodes[: graph.loss])
        if not node.once and node.creates
    }


def _crossing(graph: StagedGraph) -> list[set[int]]:
    """Return, for each forward position, the nodes whose outputs forward still reads after it."""
    last = [
        max((r for a in graph.nodes[k].creates for r in graph.readers[a] if r <= graph.loss), default=k)
        for k in range(graph.loss)
    ]
    alive: set[int] = set()
    found = []
    for position in range(graph.loss):
        alive = {k for k in alive if last[k] > position}
        if last[position] > position:
            alive.add(position)
        found.append(set(alive))
    return found


def _cut_positions(graph: StagedGraph, crossing: list[set[int]], count: int) -> list[int]:
    """Return `count` − 1 positions that split forward into equal times, each shifted to the thinnest cut nearby."""
    if count < 2 or graph.loss < 2:
        return []
    elapsed, marks = 0.0, []
    for k in range(graph.loss):
        elapsed += graph.nodes[k].time_s
        marks.append(elapsed)
    width = max(1, graph.loss // (4 * count))
    found = []
    for i in range(1, count):
        goal = elapsed * i / count
        middle = min(range(graph.loss), key=lambda p: (abs(marks[p] - goal), p))
        nearby = range(max(0, middle - width), min(graph.loss, middle + width + 1))
        found.append(
            min(
                nearby,
                key=lambda p: (
                    sum(graph.nbytes[a] for k in crossing[p] for a in graph.nodes[k].creates),
                    abs(p - middle),
                    p,
                ),
            )
        )
    return sorted(set(found))
