"""Says what FSDP2 takes for a group in each of its four states, ({device, host} × {reshard, keep}), in time.

| symbol | here | meaning | unit |
|---|---|---|---|
| N, N′ | `elements`, `trainable` | elements of the group, and those that have gradients | – |
| s, c, o | `stored_bytes`, `compute_bytes`, `state_bytes` | stored weights, gathered ones, states | bytes each |
| r | `reduced_bytes` | gradients as they are reduced; c unless a policy says otherwise | bytes each |
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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stowage.stages.formulations.sharding.memory import (
    Moment,
    State,
    gathered_bytes,
    moments,
    reduced_bytes,
    states_of,
)
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import GroupChoice


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
        return states_of(self.problem.groups[i])

    def forward(self, i: int, state: State) -> Durations:
        """Return what forward takes."""
        group, machine = self.problem.groups[i], self.problem.machine
        reload_s = group.elements * group.stored_bytes / machine.reload_bytes_per_s if state.on_host else 0.0
        return Durations(reload_s, machine.collective_s(gathered_bytes(group)) if group.elements else 0.0)

    def backward(self, i: int, state: State) -> Durations:
        """Return what backward takes."""
        group, machine = self.problem.groups[i], self.problem.machine
        again = Durations(0.0, 0.0) if state.keep else self.forward(i, state)
        reduce_s = machine.collective_s(reduced_bytes(group)) if group.trainable else 0.0
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
        if not state.on_host or self.problem.host_is_device:
            return 0
        parts = (group.elements * group.stored_bytes, group.trainable * group.state_bytes)
        return self.ranks * sum(-(-n // self.ranks) for n in (*parts, group.trainable * group.stored_bytes))

    def device_bytes(self, choices: Sequence[GroupChoice]) -> int:
        """Return the most bytes on a device at any moment."""
        states = [State(c.on_host, c.keep) for c in choices]
        return max(m.constant + sum(m.chosen.get((i, s), 0) for i, s in enumerate(states)) for m in self.moments)

    def host_total(self, choices: Sequence[GroupChoice]) -> int:
        """Return the bytes in the host, of all groups."""
        return sum(self.host_bytes(i, State(c.on_host, c.keep)) for i, c in enumerate(choices))

    @cached_property
    def host_moment(self) -> Moment:
        """Return what the groups take of the host, which is the same at every moment."""
        found = {(i, s): self.host_bytes(i, s) for i in range(len(self.problem.groups)) for s in self.states(i)}
        return Moment("host", 0, {key: nbytes for key, nbytes in found.items() if nbytes})

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Return every moment at which the memory of a device may bind."""
        return moments(self.problem)
