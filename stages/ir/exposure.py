"""Estimates which part of collectives' time computing will wait for, before any plan is made.

Planners order nodes as if each were computed in its place. A gather that runs beside computing costs less than that,
and nothing if there is enough to compute meanwhile. So planners are given shorter times; the referee takes the true
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stowage.stages.ir.graph import ComputeNode

HIDDEN_BESIDE = 0.8
"""Share of the time of computing beside which collectives can run in practice."""

LEAST_EXPOSED = 0.05
"""Share of collectives' time that is always counted, so that of equal plans the one with fewer is taken."""


def exposed_share(nodes: Sequence[ComputeNode]) -> float:
    """Return the share of collectives' time that computing is likely to wait for, if every weight is gathered twice."""
    computing_s = sum(n.time_s for n in nodes if not n.collective)
    together_s = sum(n.time_s * (2 if n.phase == "forward" else 1) for n in nodes if n.collective)
    if not together_s:
        return 1.0
    return max(LEAST_EXPOSED, 1.0 - HIDDEN_BESIDE * computing_s / together_s)


def exposed(nodes: Sequence[ComputeNode]) -> Sequence[ComputeNode]:
    """Return nodes whose times planners should count with; the very sequence where there is no collective."""
    if not any(n.collective for n in nodes):
        return nodes
    share = exposed_share(nodes)
    return [replace(n, time_s=n.time_s * share) if n.collective else n for n in nodes]
