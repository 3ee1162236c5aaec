"""Simulates a step under PyTorch's FSDP2, with a choice for each group: on the device or on the host, keep or not.

What FSDP2 does, as its code has it:

- A group on the device is gathered before its forward, in the type it computes with; unless it is kept, its weights are
  let go after forward and gathered again for backward. Its gradients are reduced in that type, and the shard of the
  result is cast to the type of the stored weights.
- Of a group on the host the shard is copied to the device in the type that is *stored* (4 bytes for a float32 master),
  and cast there, once for each gather. The gradient's shard is copied back in the stored type too.
- The optimizer runs when backward has ended and all gradients have arrived: on the host for groups on the host. What it
  updates on the devices and on the host is counted one after the other.
- The output of an all-gather is a buffer beside the weights that are copied out of it, and the input of a
  reduce-scatter one beside the gradients that are copied into it; a buffer stays until the next group's is used.
- The root is gathered once, and let go at the end of backward. Its activations are counted at the turn from forward to
  backward, where a tied head runs.

With micro-batches each one gathers, reduces and copies anew, and shards of gradients stay from one to the next. The
host adds to a gradient that it has already, so that backward waits for the copy; the first micro-batch need not, and is
counted like the others.

The host's memory is counted without what pinning rounds up.
"""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.simulate.parallel.lanes import LaneRules, Lanes, Use
from stowage.stages.simulate.parallel.outcome import ParallelOutcome


def simulate_fsdp2(
    groups: Sequence[ParameterGroup],
    choices: Sequence[GroupChoice],
    machine: ParallelMachine,
    *,
    micro_batches: int = 1,
    ahead: int = 1,
    fixed_bytes: int = 0,
) -> ParallelOutcome:
    """Simulate one step.

    Args:
        groups: all groups, in the order of forward.
        choices: a choice for each.
        machine: the machine.
        micro_batches: forwards and backwards before the update.
        ahead: groups that are gathered while one computes (FSDP2 itself gathers one ahead).
        fixed_bytes: whatever else is on each device: buffers, the batch, the driver's own.
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
    return ParallelOutcome(
        time_s=micro_batches * max(lanes.end_s, both) + update_s,
        device_bytes=fixed_bytes + _device_bytes(groups, choices, machine.ranks, micro_batches, ahead),
        host_bytes=sum(
            g.elements * g.stored_bytes + g.trainable * (g.state_bytes + g.stored_bytes)
            for g, c in zip(groups, choices, strict=True)
            if c.on_host
        ),
        update_s=update_s,
    )


def _gathered(g: ParameterGroup) -> int:
    return g.elements * g.compute_bytes


def _gradients(g: ParameterGroup) -> int:
    return g.trainable * g.compute_bytes


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


def _device_bytes(
    groups: Sequence[ParameterGroup], choices: Sequence[GroupChoice], ranks: int, micro_batches: int, ahead: int
) -> int:
    """Return the most bytes at any moment, with a moment for each use and one for the update."""
    whole = [c.keep or g.is_root for g, c in zip(groups, choices, strict=True)]
    shards = sum(
        _shard(g.elements * g.stored_bytes + g.trainable * g.state_bytes, ranks)
        for g, c in zip(groups, choices, strict=True)
        if not c.on_host
    )
    gradients = [
        0 if c.on_host else _shard(g.trainable * g.stored_bytes, ranks) for g, c in zip(groups, choices, strict=True)
    ]
    waiting = sum(gradients) if micro_batches > 1 else 0
    copied = [_shard(g.elements * g.stored_bytes, ranks) if c.on_host else 0 for g, c in zip(groups, choices)]
    all_saved = sum(g.saved_bytes for g in groups)
    all_kept = sum(_gathered(g) for g, stays in zip(groups, whole, strict=True) if stays)
    root = sum(_gradients(g) for g in groups if g.is_root)
    most = shards + sum(gradients)
    kept = saved = 0
    for i, g in enumerate(groups):
        if g.is_root:  # its last part runs after all others
            now = all_kept + _gathered(g) + copied[i] + all_saved - g.saved_bytes + g.forward_peak_bytes
        else:
            soon = range(i, min(i + ahead, len(groups) - 1) + 1)
            buffers = sum(_gathered(groups[j]) + copied[j] for j in soon)
            now = kept + _gathered(g) + buffers + saved + g.forward_peak_bytes
        most = max(most, shards + waiting + now)
        kept += _gathered(g) if whole[i] else 0
        saved += g.saved_bytes
    reduced = waiting
    before = 0
    for i, g in reversed(list(enumerate(groups))):
        saved -= g.saved_bytes
        if g.is_root:  # its first part runs before all others
            now = all_kept + root + _gradients(g) + all_saved - g.saved_bytes + g.backward_peak_bytes
            most = max(most, shards + waiting + now)
        else:
            same = [j for j, other in enumerate(groups) if j == i or (g.segment >= 0 and other.segment == g.segment)]
            weights = sum(_gathered(groups[j]) for j in same if not whole[j])
            soon = range(max(i - ahead, 0), i + 1)
            buffers = sum(_gathered(groups[j]) + copied[j] for j in soon if not whole[j])
            scatter = max(_gradients(g), before)
            now = kept + weights + buffers + root + _gradients(g) + scatter + saved + g.backward_peak_bytes
            most = max(most, shards + reduced + now)
            kept -= _gathered(g) if whole[i] else 0
        reduced += gradients[i] if micro_batches == 1 else 0
        before = _gradients(g)
    return most


def _shard(nbytes: int, ranks: int) -> int:
    return -(-nbytes // ranks)
