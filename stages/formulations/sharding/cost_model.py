"""Says what FSDP2 takes for a group in each of its four states: ({device, host} × {reshard, keep}).

| symbol | here | meaning | unit |
|---|---|---|---|
| N, N′ | `elements`, `trainable` | elements of the group, and those that have gradients | – |
| s, c, o | `stored_bytes`, `compute_bytes`, `state_bytes` | stored weights, gathered ones, states | bytes each |
| n | `machine.ranks` | ranks | – |
| B_c2g, B_g2c | `reload_bytes_per_s`, `offload_bytes_per_s` | to the devices and back, all ranks together | bytes/s |
| V_g, V_c | `device_updates_per_s`, `host_updates_per_s` | updates, all ranks together | elements/s |

FSDP2 copies a shard in its *stored* type and casts it on the device, once for every gather; the shard of a gradient is
cast to the stored type before it is copied. So for all ranks together:

| state | host to devices | devices to host | gathers |
|---|---|---|---|
| device, reshard | 0 | 0 | 2 · c N |
| device, keep | 0 | 0 | c N |
| host, reshard | 2 · s N | s N′ | 2 · c N |
| host, keep | s N | s N′ | c N |

With a float32 master (s = 4) these are 8 and 4 bytes an element up, and 4 down. Elixir's own engine moves L_c = 2 bytes
each way instead (its equations 1 and 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import GroupChoice, ParameterGroup


class State(NamedTuple):
    """One of the four states of a group."""

    on_host: bool
    keep: bool


STATES = (State(False, False), State(False, True), State(True, False), State(True, True))


@dataclass(frozen=True)
class Moment:
    """A moment at which memory may bind.

    Attributes:
        name: for people.
        constant: bytes whatever is chosen.
        chosen: bytes by position of a group and state, where that is not 0.
    """

    name: str
    constant: int
    chosen: Mapping[tuple[int, State], int]


@dataclass(frozen=True)
class Durations:
    """How long the lanes are busy with one use of a group in one state, in seconds (see `Use` of the referee)."""

    reload_s: float
    gather_s: float
    reduce_s: float = 0.0
    offload_s: float = 0.0


class CostModel:
    """Holds the coefficients of a problem: durations of every use, and bytes at every moment."""

    def __init__(self, problem: ShardingProblem) -> None:
        self.problem = problem
        self.ranks = problem.machine.ranks

    def states(self, i: int) -> tuple[State, ...]:
        """List the states that a group may have: the root is always kept."""
        return tuple(s for s in STATES if s.keep or not self.problem.groups[i].is_root)

    def forward(self, i: int, state: State) -> Durations:
        """Return what forward takes."""
        group, machine = self.problem.groups[i], self.problem.machine
        reload_s = group.elements * group.stored_bytes / machine.reload_bytes_per_s if state.on_host else 0.0
        return Durations(reload_s, machine.collective_s(gathered_bytes(group)) if group.elements else 0.0)

    def backward(self, i: int, state: State) -> Durations:
        """Return what backward takes."""
        group, machine = self.problem.groups[i], self.problem.machine
        again = Durations(0.0, 0.0) if state.keep else self.forward(i, state)
        reduce_s = machine.collective_s(gradient_bytes(group)) if group.trainable else 0.0
        sent = group.trainable * group.stored_bytes if state.on_host else 0
        return Durations(again.reload_s, again.gather_s, reduce_s, sent / machine.offload_bytes_per_s)

    def update_s(self, i: int, state: State) -> float:
        """Return the time of the update."""
        machine = self.problem.machine
        rate = machine.host_updates_per_s if state.on_host else machine.device_updates_per_s
        return self.problem.groups[i].trainable / rate

    def link_bytes(self, i: int, state: State) -> int:
        """Return the bytes that pass the link to the host in one forward and backward, both directions together."""
        group = self.problem.groups[i]
        times = 1 if state.keep else 2
        return (times * group.elements + group.trainable) * group.stored_bytes if state.on_host else 0

    def host_bytes(self, i: int, state: State) -> int:
        """Return the bytes in the host, of all ranks: weights, gradients and states."""
        group = self.problem.groups[i]
        if not state.on_host:
            return 0
        return group.elements * group.stored_bytes + group.trainable * (group.state_bytes + group.stored_bytes)

    def device_bytes(self, choices: Sequence[GroupChoice]) -> int:
        """Return the most bytes on a device at any moment."""
        states = [State(c.on_host, c.keep) for c in choices]
        return max(m.constant + sum(m.chosen.get((i, s), 0) for i, s in enumerate(states)) for m in self.moments)

    def host_total(self, choices: Sequence[GroupChoice]) -> int:
        """Return the bytes in the host, of all groups."""
        return sum(self.host_bytes(i, State(c.on_host, c.keep)) for i, c in enumerate(choices))

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Return every use in forward and in backward, and the update."""
        groups = self.problem.groups
        return (
            *(self._forward_moment(i) for i in range(len(groups))),
            *(self._backward_moment(i) for i in reversed(range(len(groups)))),
            Moment("update", self.problem.fixed_bytes, self._shards(range(len(groups)))),
        )

    def _shards(self, reduced: Sequence[int] | range) -> dict[tuple[int, State], int]:
        """Return the shards of weights and states, and of gradients where these are reduced."""
        found: dict[tuple[int, State], int] = {}
        with_gradients = set(reduced)
        for i, g in enumerate(self.problem.groups):
            nbytes = self._share(g.elements * g.stored_bytes + g.trainable * g.state_bytes)
            if i in with_gradients:
                nbytes += self._share(g.trainable * g.stored_bytes)
            for state in self.states(i):
                if not state.on_host:
                    found[i, state] = nbytes
        return found

    def _share(self, nbytes: int) -> int:
        return -(-nbytes // self.ranks)

    def _arriving(self, i: int, state: State) -> int:
        """Return what a group takes while it is gathered, beside its weights: a buffer, and the shard's copy."""
        g = self.problem.groups[i]
        return gathered_bytes(g) + (self._share(g.elements * g.stored_bytes) if state.on_host else 0)

    def _gradients_before(self, i: int) -> range:
        """Return the groups whose gradients are reduced before the backward of a group; the root's runs at the turn."""
        if self.problem.micro_batches > 1:
            return range(len(self.problem.groups))
        return range(0) if self.problem.groups[i].is_root else range(i + 1, len(self.problem.groups))

    def _kept(self, chosen: dict[tuple[int, State], int], kept: Iterable[int]) -> None:
        for j in kept:
            for state in self.states(j):
                if state.keep:
                    _add(chosen, j, state, gathered_bytes(self.problem.groups[j]))

    def _forward_moment(self, i: int) -> Moment:
        groups, problem = self.problem.groups, self.problem
        group, count = groups[i], len(groups)
        chosen = self._shards(range(count) if problem.micro_batches > 1 else ())
        self._kept(chosen, range(count) if group.is_root else range(i))
        arriving = range(i, i + 1) if group.is_root else range(i, min(i + problem.ahead, count - 1) + 1)
        for j in arriving:
            for state in self.states(j):
                _add(chosen, j, state, self._arriving(j, state))
        saved = sum(g.saved_bytes for g in groups if g is not group) if group.is_root else _saved(groups[:i])
        own = 0 if group.is_root else gathered_bytes(group)
        return Moment(f"forward_{i}", problem.fixed_bytes + saved + own + group.forward_peak_bytes, chosen)

    def _backward_moment(self, i: int) -> Moment:
        groups, problem = self.problem.groups, self.problem
        group, everything = groups[i], range(len(groups))
        chosen = self._shards(self._gradients_before(i))
        root = sum(gradient_bytes(g) for g in groups if g.is_root)
        fixed = problem.fixed_bytes + root + group.backward_peak_bytes
        if group.is_root:
            self._kept(chosen, everything)
            saved = sum(g.saved_bytes for g in groups if g is not group)
            return Moment(f"backward_{i}", fixed + saved + gradient_bytes(group), chosen)
        self._kept(chosen, [j for j in everything if j <= i or groups[j].is_root])
        for j in everything:
            if j == i or (group.segment >= 0 and groups[j].segment == group.segment):
                for state in self.states(j):
                    if not state.keep:
                        _add(chosen, j, state, gathered_bytes(groups[j]))
        for j in range(max(i - problem.ahead, 0), i + 1):
            for state in self.states(j):
                if not state.keep:
                    _add(chosen, j, state, self._arriving(j, state))
        after = gradient_bytes(groups[i + 1]) if i + 1 < len(groups) else 0
        gradients = gradient_bytes(group) + max(gradient_bytes(group), after)
        return Moment(f"backward_{i}", fixed + _saved(groups[:i]) + gradients, chosen)


def _saved(groups: Iterable[ParameterGroup]) -> int:
    return sum(g.saved_bytes for g in groups)


def gathered_bytes(group: ParameterGroup) -> int:
    """Return the bytes of a group's gathered weights, c N."""
    return group.elements * group.compute_bytes


def gradient_bytes(group: ParameterGroup) -> int:
    """Return the bytes of a group's gradients before they are reduced, c N′."""
    return group.trainable * group.compute_bytes


def _add(chosen: dict[tuple[int, State], int], i: int, state: State, nbytes: int) -> None:
    chosen[i, state] = chosen.get((i, state), 0) + nbytes
