"""Gives the solver a choice to begin with: the moments that follow from it, by the same rows."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.formulations.sharding.cost_model import Durations
from stowage.stages.formulations.sharding.four_states.model import FourStates, Lane
from stowage.stages.formulations.sharding.memory import State
from stowage.stages.ir.parallel import GroupChoice


def begin_with(m: FourStates, choices: Sequence[GroupChoice]) -> float:
    """Set the initial value of every variable to what follows from choices within the budgets.

    Returns:
        the moment at which forward and backward have ended, in time units.
    """
    chosen = [State(c.on_host, c.keep) for c in choices]
    for (i, state), variable in m.state.items():
        variable.setInitialValue(int(chosen[i] == state))
    end = _Moments(m, chosen).run()
    both = sum(m.costs.link_bytes(i, s) for i, s in enumerate(chosen)) / m.problem.machine.duplex_bytes_per_s
    end = max(end, both / m.time_unit)
    if m.problem.host_updates_beside:
        end = max(end, sum(m.costs.update_s(i, s) for i, s in enumerate(chosen) if s.on_host) / m.time_unit)
    m.end.setInitialValue(end)
    return end


class _Moments:
    """Finds the moments, in the order in which things are asked for."""

    def __init__(self, m: FourStates, chosen: Sequence[State]) -> None:
        self._m = m
        count = len(m.uses)
        self._reloaded, self._gathered, self._computed = [0.0] * count, [0.0] * count, [0.0] * count
        self._reduced, self._offloaded = [0.0] * count, [0.0] * count
        self._free = [0.0] * count
        self._takes = [self._durations(u, chosen[use.group]) for u, use in enumerate(m.uses)]
        self._shared = m.problem.machine.collectives_share_link
        self._on_link = {event.lane for event in m.asked()}
        self._link = 0.0

    def _durations(self, u: int, state: State) -> Durations:
        d, unit = self._m.durations(u, state), self._m.time_unit
        return Durations(d.reload_s / unit, d.gather_s / unit, d.reduce_s / unit, d.offload_s / unit)

    def run(self) -> float:
        """Set every moment, and return the last one."""
        m = self._m
        for first in (0, m.turn):
            last = first + m.turn
            for u in range(first, min(first + m.ahead, last)):
                self._gather(u, first)
            for u in range(first, last):
                if u + m.ahead < last:
                    self._gather(u + m.ahead, first)
                self._compute(u)
        found = (
            (m.reloaded, self._reloaded),
            (m.gathered, self._gathered),
            (m.computed, self._computed),
            *([(m.free[m.turn :], self._free[m.turn :])] if m.waits else []),
            (m.reduced, self._reduced),
            (m.offloaded, self._offloaded),
        )
        for variables, values in found:
            for variable, value in zip(variables, values, strict=True):
                variable.setInitialValue(value)
        return max(self._computed[-1], *self._offloaded)

    def _end(self, lane: Lane, begin: float, seconds: float) -> float:
        if lane not in self._on_link:
            return begin + seconds
        self._link = max(begin, self._link) + seconds
        return self._link

    def _gather(self, u: int, first: int) -> None:
        before = max(u - self._m.ahead, first) - 1
        begin = self._free[before] if before >= 0 else 0.0
        if u and not self._shared:
            begin = max(begin, self._reloaded[u - 1])
        self._reloaded[u] = self._end("reload", begin, self._takes[u].reload_s)
        self._gathered[u] = self._end("gather", self._reloaded[u], self._takes[u].gather_s)

    def _compute(self, u: int) -> None:
        takes, m = self._takes[u], self._m
        group = m.problem.groups[m.uses[u].group]
        seconds = (group.backward_s if m.uses[u].backward else group.forward_s) / m.time_unit
        seconds += m.problem.machine.collective_slowdown * (takes.gather_s + takes.reduce_s)
        before = self._free[u - 1] if u else 0.0
        ready = self._gathered[u] if takes.reload_s or takes.gather_s else 0.0
        self._computed[u] = max(before, ready) + seconds
        self._reduced[u] = self._end("reduce", self._computed[u], takes.reduce_s)
        begin = self._reduced[u] if self._shared or not u else max(self._reduced[u], self._offloaded[u - 1])
        self._offloaded[u] = self._end("offload", begin, takes.offload_s)
        waits = m.waits and takes.offload_s > 0
        self._free[u] = max(self._computed[u], self._offloaded[u]) if waits else self._computed[u]
