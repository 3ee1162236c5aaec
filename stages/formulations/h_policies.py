"""Feasible schedules of an H-Graph at once: keep-all, recompute-all, Chen's √n, and a greedy one for given budgets.

All are choices of `h_lazy.py`. The greedy looks where a budget is broken and gives up what costs the least time per
byte there: a faster option for a smaller one, a phantom (fast-forward now, forward again later), an idle value; then it
takes back whatever turns out not to have been needed. They are answers by themselves, and the solvers' first
incumbents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from stowage.stages.formulations.h_answer import HAnswer, answer_of
from stowage.stages.formulations.h_greedy import polish, relieve
from stowage.stages.formulations.h_lazy import HCandidate, HChoice, candidate_of, repeatable
from stowage.stages.formulations.h_problem import HProblem
from stowage.stages.formulations.h_staged import HRuns, cost_of, schedule_of, timeline
from stowage.stages.ir.h_graph import HGraph, HSchedule

VERSION = "1"
# More clusters than this, and taking back is tried for the dearest alone.
_TRIES = 60


def fastest_options(data: HProblem) -> tuple[int, ...]:
    """The fastest option of each cluster; of equally fast ones the smallest."""

    def price(j: int, o: int) -> tuple[float, int, int]:
        option = data.graph.clusters[j].options[o]
        return option.forward.time_s + option.backward.time_s, option.phantom_bytes, o

    return tuple(min(range(len(c.options)), key=lambda o: price(j, o)) for j, c in enumerate(data.graph.clusters))


def smallest_options(data: HProblem) -> tuple[int, ...]:
    """The option of each cluster with the smallest phantom; of equals the fastest."""

    def price(j: int, o: int) -> tuple[int, float, int]:
        option = data.graph.clusters[j].options[o]
        return option.phantom_bytes, option.forward.time_s + option.backward.time_s, o

    return tuple(min(range(len(c.options)), key=lambda o: price(j, o)) for j, c in enumerate(data.graph.clusters))


def keep_all(data: HProblem) -> HCandidate:
    """Every node once, every cluster with its fastest option."""
    return candidate_of(data, HChoice(fastest_options(data)))


def recompute_all(data: HProblem) -> HCandidate:
    """Hold what leaves forward alone, and run forward again."""
    return _dropping(data, range(data.graph.loss), fastest_options(data))


def chen(data: HProblem, segments: int | None = None) -> HCandidate:
    """Checkpoints between `segments` stretches of forward of equal time (by default √n, Chen et al. 2016); all else is
    made again, stretch by stretch."""
    loss = data.graph.loss
    count = segments or max(1, round(math.sqrt(loss)))
    return _dropping(data, set(range(loss)) - _checkpoints(data, count), fastest_options(data))


def greedy(graph: HGraph, peak_bytes: int, save_bytes: int) -> HAnswer | None:
    """The fastest schedule within both budgets (see `h_problem`) that the policies find, or None where they find none.

    Raises:
        ValueError: this is no H-Graph.
    """
    graph.check()
    data = HProblem(graph)
    found = best_within(data, starts(data), peak_bytes, save_bytes)
    if found is None:
        return None
    return answer_of(data, (peak_bytes, save_bytes), found, "heuristic", data.floor_s, "h_greedy")


def starts(data: HProblem) -> list[HCandidate]:
    """The policies, with few and many segments, and with the smallest options; none twice."""
    loss, small = data.graph.loss, smallest_options(data)
    counts = sorted({2, 3, 4, 6, 8, max(1, round(math.sqrt(loss)))} & set(range(2, max(3, loss))))
    found = [keep_all(data), *(chen(data, count) for count in counts), recompute_all(data)]
    found.append(candidate_of(data, HChoice(small)))
    found.extend(_dropping(data, set(range(loss)) - _checkpoints(data, count), small) for count in (1, *counts))
    return list({_key(c.choice): c for c in found}.values())


def best_within(
    data: HProblem, candidates: Iterable[HCandidate], peak_bytes: int, save_bytes: int, known: Iterable[HRuns] = ()
) -> HRuns | None:
    """The fastest executions within both budgets: of `known`, of the candidates, and of what grows out of them."""
    best: tuple[float, HRuns] | None = None
    for runs in known:
        cost = cost_of(data, timeline(data, runs))
        if cost.within(peak_bytes, save_bytes) and (best is None or cost.time_s < best[0]):
            best = cost.time_s, runs
    grown: list[HCandidate] = []
    for start in candidates:
        for foresight in (0.0, 1.0):
            found = relieve(data, start, peak_bytes, save_bytes, foresight)
            if found is not None:
                grown.append(found)
    for candidate in sorted(grown, key=lambda c: (c.cost.time_s, c.cost.peak_bytes))[:3]:
        better = polish(data, candidate, peak_bytes, save_bytes, _TRIES)
        if best is None or better.cost.time_s < best[0]:
            best = better.cost.time_s, better.runs
    return None if best is None else best[1]


def policy_schedules(graph: HGraph) -> dict[str, HSchedule]:
    """The fixed policies as schedules, whatever memory they take: "keep_all", "recompute_all", "chen"."""
    graph.check()
    data = HProblem(graph)
    policies = {"keep_all": keep_all(data), "recompute_all": recompute_all(data), "chen": chen(data)}
    return {name: schedule_of(data, found.events) for name, found in policies.items()}


def _key(choice: HChoice) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
    return choice.options, tuple(sorted(choice.dropped)), tuple(sorted(choice.cuts))


def _dropping(data: HProblem, nodes: Iterable[int], options: tuple[int, ...]) -> HCandidate:
    """Hold neither values nor phantoms of these forward nodes across the loss; what leaves forward is held."""
    loss = data.graph.loss
    leaving = {c for d in data.graph.nodes[loss].reads for c in data.contributors[d]}
    again = [k for k in nodes if repeatable(data, k)]
    cuts = frozenset((k, loss) for k in again if k not in leaving)
    return candidate_of(
        data, HChoice(options, frozenset(data.forward_of[k] for k in again if k in data.forward_of), cuts)
    )


def _checkpoints(data: HProblem, segments: int) -> set[int]:
    """Forward nodes whose values cross the end of a stretch."""
    loss = data.graph.loss
    times = [min(way.time_s for way in data.ways[k]) for k in range(loss)]
    total, elapsed, ends = sum(times), 0.0, set[int]()
    for k, time_s in enumerate(times):
        before = int(elapsed * segments / total) if total else 0
        elapsed += time_s
        if total and int(elapsed * segments / total * (1 + 1e-9)) > before and k < loss - 1:
            ends.add(k)
    last = {
        k: max((r for d in data.graph.nodes[k].makes for r in data.readers[d] if r <= loss), default=k)
        for k in range(loss)
    }
    return {k for k in range(loss) if any(k <= end < last[k] for end in ends)}
