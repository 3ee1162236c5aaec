"""Simulates a step under PyTorch's FSDP2, with a choice for each group: on the device or on the host, keep or not.

What FSDP2 does, as its code has it:

- A group on the device is gathered before its forward, in the type it computes with; unless it is kept, its weights are
  let go after forward and gathered again for backward. Its gradients are reduced in that type, unless a policy of mixed
  precision names another, and the shard of the result is cast to the type of the stored weights.
- Of a group on the host the shard is copied to the device in the type that is *stored* (4 bytes for a float32 master),
  and cast there, once for each gather. The gradient's shard is copied back in the stored type too.
- The optimizer runs when backward has ended and all gradients have arrived: on the host for groups on the host. What it
  updates on the devices and on the host is counted one after the other.
- The root is gathered once, and let go at the end of backward.
- What is in memory is replayed in `memory`.

With micro-batches each one gathers, reduces and copies anew, and shards of gradients stay from one to the next. The
host adds to a gradient that it has already, so that backward waits for the copy; the first micro-batch need not, and is
counted like the others.

The host's memory is counted without what pinning rounds up.
"""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.simulate.parallel.lanes import LaneRules, Lanes, Use
from stowage.stages.simulate.parallel.memory import RankRules, rank_memory
from stowage.stages.simulate.parallel.outcome import ParallelOutcome


def simulate_fsdp2(
    groups: Sequence[ParameterGroup],
    choices: Sequence[GroupChoice],
    machine: ParallelMachine,
    *,
    micro_batches: int = 1,
    ahead: int = 1,
    fixed_bytes: int = 0,
    copies: bool = False,
    host_is_device: bool = False,
) -> ParallelOutcome:
    """Simulate one step.

    Args:
        groups: all groups, in the order of forward.
        choices: a choice for each.
        machine: the machine.
        micro_batches: forwards and backwards before the update.
        ahead: groups that are gathered while one computes (FSDP2 itself gathers one ahead).
        fixed_bytes: whatever else is on each device: buffers, the batch, the driver's own.
        copies: collectives copy what they work on, as gloo does.
        host_is_device: the device is a CPU: what is in the host takes the device's own memory.
    """
    rules = LaneRules(
        ahead,
        offload_waits=micro_batches > 1,
        shared_link=machine.collectives_share_link,
        slowdown=machine.collective_slowdown,
    )
    lanes = Lanes(rules)
    lanes.run([_forward(g, c, machine) for g, c in zip(groups, choices, strict=True)])
    lanes.run([_backward(g, c, machine) for g, c in zip(reversed(groups), reversed(choices), strict=True)])
    both = sum(_link_bytes(g, c) for g, c in zip(groups, choices, strict=True)) / machine.duplex_bytes_per_s
    update_s = sum(
        g.trainable / (machine.host_updates_per_s if c.on_host else machine.device_updates_per_s)
        for g, c in zip(groups, choices, strict=True)
    )
    memory = RankRules(machine.ranks, ahead, copies, host_is_device, accumulated=micro_batches > 1)
    found = rank_memory(groups, choices, memory, fixed_bytes=fixed_bytes)
    return ParallelOutcome(
        time_s=micro_batches * max(lanes.end_s, both) + update_s,
        device_bytes=found.device_bytes,
        host_bytes=machine.ranks * found.host_bytes,
        update_s=update_s,
    )


def _gathered(g: ParameterGroup) -> int:
    return g.elements * g.compute_bytes


def _gradients(g: ParameterGroup) -> int:
    return g.trainable * g.reduced_bytes


def _before(g: ParameterGroup, c: GroupChoice, machine: ParallelMachine) -> tuple[float, float]:
    reload_s = g.elements * g.stored_bytes / machine.reload_bytes_per_s if c.on_host else 0.0
    return reload_s, machine.collective_s(_gathered(g)) if g.elements else 0.0


def _forward(g: ParameterGroup, c: GroupChoice, machine: ParallelMachine) -> Use:
    reload_s, gather_s = _before(g, c, machine)
    return Use(g.forward_s, reload_s, gather_s)


def _backward(g: ParameterGroup, c: GroupChoice, machine: ParallelMachine) -> Use:
    reload_s, gather_s = (0.0, 0.0) if c.keep or g.is_root else _before(g, c, machine)
    reduce_s = machine.collective_s(_gradients(g)) if g.trainable else 0.0
    offload_s = g.trainable * g.stored_bytes / machine.offload_bytes_per_s if c.on_host else 0.0
    return Use(g.backward_s, reload_s, gather_s, reduce_s, offload_s)


def _link_bytes(g: ParameterGroup, c: GroupChoice) -> int:
    if not c.on_host:
        return 0
    times = 1 if c.keep or g.is_root else 2
    return (times * g.elements + g.trainable) * g.stored_bytes
