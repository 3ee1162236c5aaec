"""Writes the equations of time: computing, the CPU, and what links carry between two cuts; `model` has the symbols."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stowage.stages.formulations.cuts.transfers.windows import Window, brought, sent
from stowage.stages.solver.equations import Constraints
from stowage.stages.solver.milp import pulp

if TYPE_CHECKING:
    from stowage.stages.formulations.cuts.transfers.model import TransferModel


def computing(m: TransferModel) -> Constraints:
    """Let each interval last as long as what runs in it: t[i + 1] − t[i] ≥ Σ_n time(n) run[n, i].

    Of collectives nothing counts here: they may run beside, see `lanes`.
    """
    time = [0.0 if n.collective else n.time_s / m.time_unit_s for n in m.step.nodes]
    for i in m.intervals:
        sure = sum(time[n] for n, k in m.domain.sure_runs if k == i)
        free = pulp.lpSum(time[n] * v for (n, k), v in m.run.items() if k == i)
        yield f"{i}", m.clock[i + 1] - m.clock[i] - free >= sure


def lanes(m: TransferModel) -> Constraints:
    """Let a period have time for all collectives, one after another: t[N + 1] ≥ Σ_n Σ_i time(n) run[n, i]."""
    if m.total is not None:
        yield "collectives", m.clock[-1] >= m.time_of(n.node for n in m.step.nodes if n.collective)


def cpu_time(m: TransferModel) -> Constraints:
    """Let the period last as long as the CPU's updates: Σ_u seconds(u) cpu[u] ≤ t[N + 1]."""
    if m.cpu:
        seconds = m.below.cpu_update_s
        yield "", pulp.lpSum(seconds[u] / m.time_unit_s * v for u, v in m.cpu.items()) <= m.clock[-1]


def between(m: TransferModel) -> Constraints:
    """Carry between two cuts what the link can carry: up[j, k] + c down[j, k] ≤ t[k] − t[j], and c up + down likewise.

    down[j, k] is the time in which the link alone sends what goes down between T_j and T_k, up[j, k] that in which it
    brings what comes up; `windows` says what that is. The second cut may be one of the next step.
    """
    last = len(m.cuts) + 1
    windows = [Window(j, k) for j in range(last) for k in range(j + 1, last + 1)]
    windows += [Window(j, k, wraps=True) for j in range(2, last) for k in range(1, j)]
    for window in windows:
        time = m.clock[window.end] - m.clock[window.begin] + (m.clock[-1] if window.wraps else 0)
        for name, constraint in _carried(m, list(sent(m, window)), list(brought(m, window)), time):
            yield f"{window.begin}_{window.end}_{name}", constraint


def period(m: TransferModel) -> Constraints:
    """Carry in a period all that moves in a step, whichever step it began in: up + c down ≤ t[N + 1], and likewise.

    up is the time of Σ_x bytes(x) Σ_i up[x, i], with reloads[p] where the CPU may update p, and down that of
    Σ_s bytes(s) sent[s, N + 1] + Σ_p bytes(p) down[p].
    """
    up = [m.sizes[x] * v for (x, _), v in m.up.items() if x not in m.reloads]
    up += [m.sizes[p] * v for p, v in m.reloads.items()]
    down = [m.sizes[p] * v for p, v in m.down.items()]
    down += [m.sizes[s] * v for (s, j), v in m.sent.items() if j == len(m.cuts) + 1]
    yield from _carried(m, down, up, m.clock[-1])


def _carried(m: TransferModel, down: Sequence[Any], up: Sequence[Any], time: Any) -> Constraints:
    """Limit what goes down and comes up in a time, both in units of memory."""
    below = m.below
    down_s = pulp.lpSum(down) * (1 / m.rate(below.link.offload_bytes_per_s))
    up_s = pulp.lpSum(up) * (1 / m.rate(below.link.reload_bytes_per_s))
    if up:
        yield "up", up_s + below.slowed * down_s <= time
    if down:
        yield "down", down_s + below.slowed * up_s <= time
    if up and down and below.both_bytes_per_s < math.inf:
        yield "both", pulp.lpSum([*down, *up]) * (1 / m.rate(below.both_bytes_per_s)) <= time
