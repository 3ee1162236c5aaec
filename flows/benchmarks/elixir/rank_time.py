"""Adds to the time of a plan what sharing costs on a machine: the referee counts collectives apart from all else.

Where collectives pass over the link to the host, everything is taken to go on at half its speed while a collective and
a copy are under way at once, so that each gets half of the link. Where computing is slower beside a collective, so is
everything. Both are schedules that the machine could run, so that the time is not too short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stowage.stages.ir.actions import ACTIONS
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.parallel import ParallelMachine
from stowage.stages.ir.plan import PlanRow

Span = tuple[float, float]


def rank_time(
    rows: Sequence[PlanRow], nodes: Sequence[ComputeNode], period_s: float, machine: ParallelMachine
) -> float:
    """Return the seconds of a plan's iteration on a machine.

    Args:
        rows: the plan as the referee timed it.
        nodes: its compute nodes.
        period_s: the time that the referee found.
        machine: says whether collectives share the link, and by how much computing beside them is slower.
    """
    collectives = united((r.start_s, r.end_s) for r in rows if r.node >= 0 and nodes[r.node].collective)
    found = period_s + machine.collective_slowdown * _length(collectives)
    if machine.collectives_share_link:
        copies = united((r.start_s, r.end_s) for r in rows if ACTIONS[r.action].transfers)
        # What is under way when the iteration ends goes on in the next one.
        again = united((a + k * period_s, b + k * period_s) for a, b in copies for k in (-1, 0, 1))
        found += _length(_common(collectives, again))
    return found


def united(spans: Iterable[Span]) -> list[Span]:
    """Return the moments that any of the spans has, as spans that do not touch each other."""
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] == span[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    return [(max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d)]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
