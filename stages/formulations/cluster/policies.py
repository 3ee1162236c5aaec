"""Quick schedules of an H-Graph: keep-all, recompute-all, Chen's √n, and a greedy one for given budgets.

All are choices of `lazy.py`, as are RK-Rotor's plans (`rotor.py`), from which the greedy rule starts too. It finds
where a budget is exceeded and gives up what costs the least time per byte there: a faster option for a smaller one, a
phantom (fast-forward now, forward again later), an idle value; then it undoes whatever was not needed after all. They
are answers by themselves, and the solvers' first incumbents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from stowage.stages.formulations.cluster.answer import Budgets, HAnswer, answer_of
from stowage.stages.formulations.cluster.greedy import polish, relieve
from stowage.stages.formulations.cluster.lazy import HCandidate, HChoice, candidate_of, repeatable
from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.formulations.cluster.rotor import HRotor
from stowage.stages.formulations.cluster.staged_order import HRuns, cost_of, schedule_of, timeline
from stowage.stages.ir.h_graph import HGraph, HSchedule

# From more decisions than this, undoing is tried for the most expensive alone.
_TRIES = 60
# Relative difference of equal times, which are sums of floats in different orders.
_SAME = 1e-9
# Number of candidates grown out of the policies that are polished, the fastest first.
_POLISHED = 3


def fastest_options(data: HProblem) -> tuple[int, ...]:
    """Return the fastest option of each cluster; of equally fast ones the smallest.

    Blocks of the chain have `ChainBlock.fastest`: there memory is what all of a block keeps, here it is the phantom.
    """

    def price(j: int, o: int) -> tuple[float, int, int]:
        option = data.graph.clusters[j].options[o]
        return option.forward.time_s + option.backward.time_s, option.phantom_bytes, o

    return tuple(min(range(len(c.options)), key=lambda o: price(j, o)) for j, c in enumerate(data.graph.clusters))


def smallest_options(data: HProblem) -> tuple[int, ...]:
    """Return the option of each cluster with the smallest phantom; of equally small ones the fastest."""

    def price(j: int, o: int) -> tuple[int, float, int]:
        option = data.graph.clusters[j].options[o]
        return option.phantom_bytes, option.forward.time_s + option.backward.time_s, o

    return tuple(min(range(len(c.options)), key=lambda o: price(j, o)) for j, c in enumerate(data.graph.clusters))


def keep_all(data: HProblem) -> HCandidate:
    """Run every node once, every cluster with its fastest option."""
    return candidate_of(data, HChoice(fastest_options(data)))


def recompute_all(data: HProblem) -> HCandidate:
    """Keep only what leaves forward, and run forward again."""
    return _dropping(data, range(data.graph.loss), fastest_options(data))


def chen(data: HProblem, segments: int | None = None) -> HCandidate:
    """Checkpoint between `segments` stretches of forward of equal time (by default √n, Chen et al. 2016).

    All else is made again, stretch by stretch.
    """
    loss = data.graph.loss
    count = segments or max(1, round(math.sqrt(loss)))
    return _dropping(data, set(range(loss)) - _checkpoints(data, count), fastest_options(data))


def greedy(graph: HGraph, peak_bytes: int, save_bytes: int) -> HAnswer | None:
    """Find the fastest schedule within both budgets (see `problem`) of the policies, or None where none fits.

    Raises:
        ValueError: the graph is no H-Graph.
    """
    graph.check()
    data = HProblem(graph)
    found = Incumbents(data).within(peak_bytes, save_bytes)
    if not found:
        return None
    return answer_of(data, (peak_bytes, save_bytes), found[0].runs, "heuristic", data.floor_s, found[0].name)


def starts(data: HProblem) -> list[HCandidate]:
    """Return the policies, with few and many segments, and with the smallest options; none twice."""
    loss, small = data.graph.loss, smallest_options(data)
    counts = sorted({2, 3, 4, 6, 8, max(1, round(math.sqrt(loss)))} & set(range(2, max(3, loss))))
    found = [keep_all(data), *(chen(data, count) for count in counts), recompute_all(data)]
    found.append(candidate_of(data, HChoice(small)))
    found.extend(_dropping(data, set(range(loss)) - _checkpoints(data, count), small) for count in (1, *counts))
    return list({_key(c.choice): c for c in found}.values())


@dataclass(frozen=True)
class Incumbent:
    """Executions within budgets, and their finder's name.

    It is "h_rotor" for an unchanged plan of RK-Rotor's, else "h_greedy".
    """

    runs: HRuns
    name: str


class Incumbents:
    """Finds schedules to start from, for any budgets: the policies, and RK-Rotor's plans where it applies."""

    def __init__(self, data: HProblem) -> None:
        self.data, self.policies = data, starts(data)
        self._rotor = HRotor.where_it_applies(data, keep_all(data).cost.peak_bytes)

    def within(self, peak_bytes: int, save_bytes: int, known: Iterable[HRuns] = ()) -> list[Incumbent]:
        """Return schedules that fit both budgets, fastest first.

        They are those of `known`, the policies, RK-Rotor's plans, and candidates grown out of them.
        """
        data, best = self.data, list[tuple[float, Incumbent]]()
        for runs in known:
            cost = cost_of(data, timeline(data, runs))
            if cost.within(peak_bytes, save_bytes):
                best.append((cost.time_s, Incumbent(runs, "h_greedy")))
        by_rotor = self._rotor.near(peak_bytes, save_bytes) if self._rotor else []
        untouched = {_key(c.choice) for c in by_rotor} - {_key(c.choice) for c in self.policies}
        grown = _grown(data, self.policies, peak_bytes, save_bytes)[:_POLISHED]
        grown += _grown(data, by_rotor, peak_bytes, save_bytes)
        for candidate in {_key(c.choice): c for c in grown}.values():
            better = polish(data, candidate, peak_bytes, save_bytes, _TRIES)
            name = "h_rotor" if _key(better.choice) in untouched else "h_greedy"
            best.append((better.cost.time_s, Incumbent(better.runs, name)))
        return [one for _, one in sorted(best, key=lambda one: one[0])]

    def smallest(self) -> list[HCandidate]:
        """Return candidates for the least memory: the policies, and RK-Rotor's tightest plans."""
        return [*self.policies, *(self._rotor.smallest if self._rotor else ())]


def _grown(data: HProblem, candidates: Iterable[HCandidate], peak_bytes: int, save_bytes: int) -> list[HCandidate]:
    """Grow candidates until they fit; return them, fastest first."""
    found = [relieve(data, c, peak_bytes, save_bytes, foresight) for c in candidates for foresight in (0.0, 1.0)]
    return sorted((c for c in found if c is not None), key=lambda c: (c.cost.time_s, c.cost.peak_bytes))


def settled(
    data: HProblem, budgets: Budgets, hint: Incumbent | None, known: Iterable[HAnswer], gap: float
) -> HAnswer | None:
    """Return the hint as the answer if bounds of larger budgets, or the fastest ways alone, prove it within `gap`."""
    if hint is None:
        return None
    bound_s = data.floor_s
    for answer in known:
        if answer.report and all(large >= small for large, small in zip(answer.budgets, budgets, strict=True)):
            bound_s = max(bound_s, answer.report.bound_s)
    found = answer_of(data, budgets, hint.runs, "optimal", bound_s, hint.name)
    return found if found.report and found.report.gap <= max(gap, _SAME) else None


def policy_schedules(graph: HGraph) -> dict[str, HSchedule]:
    """Return the fixed policies as schedules, whatever memory they take: "keep_all", "recompute_all", "chen"."""
    graph.check()
    data = HProblem(graph)
    policies = {"keep_all": keep_all(data), "recompute_all": recompute_all(data), "chen": chen(data)}
    return {name: schedule_of(data, found.events) for name, found in policies.items()}


def _key(choice: HChoice) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
    return choice.options, tuple(sorted(choice.dropped)), tuple(sorted(choice.cuts))


def _dropping(data: HProblem, nodes: Iterable[int], options: tuple[int, ...]) -> HCandidate:
    """Keep neither values nor phantoms of these forward nodes across the loss; what leaves forward is kept."""
    loss = data.graph.loss
    leaving = {c for d in data.graph.nodes[loss].reads for c in data.contributors[d]}
    again = [k for k in nodes if repeatable(data, k)]
    cuts = frozenset((k, loss) for k in again if k not in leaving)
    return candidate_of(
        data, HChoice(options, frozenset(data.forward_of[k] for k in again if k in data.forward_of), cuts)
    )


def _checkpoints(data: HProblem, segments: int) -> set[int]:
    """Return the forward nodes whose values cross the end of a stretch."""
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
