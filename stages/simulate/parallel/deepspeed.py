"""Simulates DeepSpeed's ZeRO-2 and ZeRO-3, with and without offloading, as its documentation and code describe them.

| | ZeRO-2 | ZeRO-3 |
|---|---|---|
| weights on a device | all of them | 1/n, and up to `live_elements` gathered ones |
| gathers | of all weights, after the update | before each use in forward and backward, one module ahead |
| reduction | in buckets, while backward goes on (`overlap_comm`) | the same |
| updates | 1/n on each rank, all at once | 1/n, by sub-groups of `sub_group_elements` |

Offloaded, the float32 master, the gradients in float32 and the states are on the host, and the host updates when
backward has ended. Gradients are cast on the device and copied as float32, and backward waits for that. After ZeRO-2's
updates the weights are cast on the host and copied to the device; ZeRO-3 has them on the host and copies a shard for
each gather, from memory that is not pinned by default: such a copy waits for the device, and nothing overlaps with it.

ZeRO-2 pins the master and the gradients, ZeRO-3 the flat buffer of its weights (DeepSpeed 0.9). Pinned memory comes
from PyTorch's caching allocator, which rounds each piece up to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stowage.stages.ir.parallel import ParallelMachine, ParameterGroup
from stowage.stages.simulate.parallel.lanes import LaneRules, Lanes, Use
from stowage.stages.simulate.parallel.outcome import ParallelOutcome

Stage = Literal[2, 3]


@dataclass(frozen=True)
class DeepSpeedSettings:
    """DeepSpeed's settings, with its defaults, and what it makes of a machine's rates.

    Attributes:
        reduce_elements: `reduce_bucket_size` of ZeRO-2, which has two of them; ZeRO-3's is small beside it.
        live_elements: `stage3_max_live_parameters`.
        sub_group_elements: `sub_group_size`.
        host_update_share: rate of its updates on the host over the machine's, casts of the results included.
        process_bytes: memory of the host for each process, beside what is simulated.
    """

    reduce_elements: int = 500_000_000
    live_elements: int = 1_000_000_000
    sub_group_elements: int = 1_000_000_000
    host_update_share: float = 1.0
    process_bytes: int = 0


DEFAULTS = DeepSpeedSettings()
"""What its documentation says, on a host as fast as the machine says."""


def simulate_zero(
    groups: Sequence[ParameterGroup],
    machine: ParallelMachine,
    stage: Stage,
    *,
    offload: bool,
    settings: DeepSpeedSettings = DEFAULTS,
    activation_bytes: int,
    fixed_bytes: int = 0,
) -> ParallelOutcome:
    """Simulate one step.

    Args:
        groups: all groups, in the order of forward.
        machine: the machine.
        stage: of ZeRO.
        offload: optimizer states (and, with ZeRO-3, weights) are on the host.
        settings: the settings.
        activation_bytes: most bytes of activations at any moment.
        fixed_bytes: whatever else is on each device.
    """
    zero = _Zero(groups, machine, settings, activation_bytes)
    device = zero.device_bytes(stage, offload=offload) + fixed_bytes
    host = zero.host_bytes(stage) if offload else 0
    update_s = zero.update_s(stage, offload=offload)
    return ParallelOutcome(zero.passes_s(stage, offload=offload) + update_s, device, host, update_s)


class _Zero:
    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        machine: ParallelMachine,
        settings: DeepSpeedSettings,
        activation_bytes: int,
    ) -> None:
        self.groups, self.machine, self.settings = groups, machine, settings
        self.activation_bytes = activation_bytes
        self.weights = sum(g.elements * g.compute_bytes for g in groups)
        self.gradients = sum(g.trainable * g.compute_bytes for g in groups)
        self.masters = sum(g.trainable * g.stored_bytes for g in groups)
        self.states = sum(g.trainable * g.state_bytes for g in groups)
        self.width = max(g.compute_bytes for g in groups)

    def passes_s(self, stage: Stage, *, offload: bool) -> float:
        """Return the time of forward and backward."""
        ahead = 1 if stage == 3 and not offload else 0
        m = self.machine
        rules = LaneRules(
            ahead, offload_waits=True, shared_link=m.collectives_share_link, slowdown=m.collective_slowdown
        )
        lanes = Lanes(rules)
        lanes.run([Use(g.forward_s, *self._before(g, stage, offload)) for g in self.groups])
        lanes.run([self._backward(g, stage, offload) for g in reversed(self.groups)])
        return lanes.end_s

    def _before(self, g: ParameterGroup, stage: Stage, offload: bool) -> tuple[float, float]:
        if stage == 2:
            return 0.0, 0.0
        nbytes = g.elements * g.compute_bytes
        return (nbytes / self.machine.reload_bytes_per_s if offload else 0.0), self.machine.collective_s(nbytes)

    def _backward(self, g: ParameterGroup, stage: Stage, offload: bool) -> Use:
        reduce_s = self.machine.collective_s(g.trainable * g.compute_bytes) if g.trainable else 0.0
        offload_s = g.trainable * g.stored_bytes / self.machine.offload_bytes_per_s if offload else 0.0
        before = (0.0, 0.0) if g.is_root else self._before(g, stage, offload)
        return Use(g.backward_s, *before, reduce_s, offload_s)

    def update_s(self, stage: Stage, *, offload: bool) -> float:
        """Return the time of the update, and of whatever must follow before the next forward."""
        m = self.machine
        trainable = sum(g.trainable for g in self.groups)
        if not offload:
            return trainable / m.device_updates_per_s + (m.collective_s(self.weights) if stage == 2 else 0.0)
        update_s = trainable / (m.host_updates_per_s * self.settings.host_update_share)
        if stage == 3:
            return update_s
        return update_s + self.weights / m.reload_bytes_per_s + m.collective_s(self.weights)

    def device_bytes(self, stage: Stage, *, offload: bool) -> int:
        """Return the most bytes on a device, while it computes and while it updates."""
        n, s = self.machine.ranks, self.settings
        shards = 0 if offload else (self.gradients + self.masters + self.states) // n
        if stage == 2:
            whole = self.weights + shards
            buckets = 2 * min(s.reduce_elements * self.width, self.gradients)
            # The gradients' shards are put together, and cast to float32.
            updating = 0 if offload else (self.gradients + self.masters) // n
            return max(whole + buckets + self.activation_bytes, whole + updating)
        live = min(s.live_elements * self.width, self.weights)
        own = 0 if offload else self.weights // n
        part = 0 if offload else min(self.masters // n, s.sub_group_elements * 4)
        return max(own + shards + live + self.activation_bytes, own + shards + part)

    def host_bytes(self, stage: Stage) -> int:
        """Return the bytes in the host, of all ranks together."""
        n = self.machine.ranks
        masters = self.masters // n
        each = self.settings.process_bytes + self.states // n
        if stage == 2:
            return n * (each + 2 * pinned_bytes(masters))
        # Gradients are there in the type of computing, and in float32.
        return n * (each + pinned_bytes(self.weights // n) + self.gradients // n + 2 * masters)


def pinned_bytes(nbytes: int) -> int:
    """Return what a piece of pinned memory takes: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 1 else nbytes
