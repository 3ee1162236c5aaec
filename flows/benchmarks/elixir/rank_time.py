"""Adds to the time of a plan what collectives cost computing on a machine, of which the referee knows nothing.

Where computing is slower beside a collective, everything is taken to be: a schedule that the machine could run, so that
the time is not too short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        machine: says by how much computing beside collectives is slower.
    """
    collectives = united((r.start_s, r.end_s) for r in rows if r.node >= 0 and nodes[r.node].collective)
    return period_s + machine.collective_slowdown * sum(end - start for start, end in collectives)


def united(spans: Iterable[Span]) -> list[Span]:
    """Return the moments that any of the spans has, as spans that do not touch each other."""
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] == span[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
