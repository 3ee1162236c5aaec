"""Chooses the schedules of a cluster that are offered to the H-Graph above it (thesis 3.4.5).

The thesis takes the schedules whose peaks are farthest apart, whatever they cost, and may take equal ones. Here a
schedule that another is no worse than in time, phantom, both peaks and what its backward reads is never taken; of the
rest it takes those that leave the least regret: how much slower, for a schedule left out, is the chosen one that fits
wherever it fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir import pareto
from stowage.stages.ir.h_graph import HOption

Costs = tuple[float, int, int, int]
"""Seconds of both parts; bytes of the phantom; most bytes inside forward, and inside backward."""


def costs_of(option: HOption) -> Costs:
    """Return an option's costs; times are rounded, since equal computations in another order take the same time."""
    time_s = float(f"{option.forward.time_s + option.backward.time_s:.12g}")
    inside = [max(step.internal_bytes for step in run.steps) for run in (option.forward, option.backward)]
    return time_s, option.phantom_bytes, inside[0], inside[1]


def undominated(options: Sequence[HOption]) -> list[HOption]:
    """Return options that no other is no worse than in everything, fastest first; of equal ones the first."""
    return pareto.undominated(sorted(options, key=lambda o: (costs_of(o), len(o.backward.reads))), _no_worse)


def select_options(options: Sequence[HOption], count: int) -> tuple[HOption, ...]:
    """Choose at most `count` options, fastest first: the fastest, then each that lowers the largest regret most.

    The regret of an option left out is how much longer the fastest chosen one takes that is no larger in phantom and
    peaks; where there is none it is more than any such time, and grows with the bytes lacking.
    """
    rest = undominated(options)
    if count >= len(rest):
        return tuple(rest)
    chosen = rest[:1]
    while len(chosen) < min(count, len(rest)):
        chosen.append(
            min(
                (o for o in rest if o not in chosen),
                key=lambda o: (*_regret(rest, [*chosen, o]), rest.index(o)),
            )
        )
    return tuple(sorted(chosen, key=rest.index))


def share_counts(numbers: Sequence[int], limit: int) -> list[int]:
    """Return the number of options each cluster may offer: its share of `limit` (N_o) by how many it has, at least one.

    The thesis writes min(1, share), which gives every cluster one; it must be max. Shares are rounded down, and what is
    left goes to those that lose most by rounding; no cluster gets more than it has.
    """
    total = sum(numbers)
    if total <= limit:
        return list(numbers)
    exact = [limit * number / total for number in numbers]
    counts = [max(1, int(share)) for share in exact]
    for k in sorted(range(len(numbers)), key=lambda k: (int(exact[k]) - exact[k], k)):
        if sum(counts) < limit and exact[k] > counts[k]:
            counts[k] += 1
    return counts


def _regret(options: Sequence[HOption], chosen: Sequence[HOption]) -> tuple[float, float]:
    """Return the largest and total regret."""
    costs, taken = [costs_of(o) for o in options], [costs_of(o) for o in chosen]
    span = max(c[0] for c in costs) - min(c[0] for c in costs)
    largest = [max(1, *(c[i] for c in costs)) for i in (1, 2, 3)]
    found = []
    for mine in costs:
        slower = [c[0] - mine[0] for c in taken if _no_larger(c[1:], mine[1:])]
        if slower:
            found.append(max(0.0, min(slower)))
            continue
        lacking = min(sum(max(0, c[i + 1] - mine[i + 1]) / largest[i] for i in range(3)) for c in taken)
        found.append((span or 1.0) * (1.0 + lacking))
    return max(found), sum(found)


def _no_worse(one: HOption, two: HOption) -> bool:
    return _no_larger(costs_of(one), costs_of(two)) and set(one.backward.reads) <= set(two.backward.reads)


def _no_larger(one: Sequence[float], two: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, two, strict=True))
