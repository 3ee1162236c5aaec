"""Simulates a step under Elixir's own engine: chunks, an rCache, gradients in the place of weights.

What Elixir does, as its paper has it (sections 3 to 5):

- Every chunk has its shards of weights, in the type of computing, and of the float32 master and the optimizer's states,
  all on the device or all on the host: (L_c + L_os·F_os) · C / n bytes. Gradients take the place of weights.
- Chunks are gathered into blocks of the rCache, of C elements each. A chunk that is kept stays there from forward to
  backward; another leaves, and comes again. Of a chunk on the host, the shard is copied to the device for each gather
  and back when it leaves, and its gradient is copied back (L_c bytes each).
- Gathers of the next chunk overlap with computing. The optimizer runs when backward has ended.
- A parameter that is used twice is treated as ZeRO-2 does: whole on every device, its states in shards.
"""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.simulate.parallel.lanes import LaneRules, Lanes, Use
from stowage.stages.simulate.parallel.outcome import ParallelOutcome


def simulate_chunks(
    chunks: Sequence[ParameterGroup],
    choices: Sequence[GroupChoice],
    machine: ParallelMachine,
    *,
    blocks: int,
    block_elements: int,
    activation_bytes: int,
    fixed_bytes: int = 0,
) -> ParallelOutcome:
    """Simulate one step.

    Args:
        chunks: all chunks, in the order of forward; the root is what is used twice.
        choices: a choice for each; the root's shards are on the device, or its states on the host.
        machine: the machine.
        blocks: blocks of the rCache, those of kept chunks among them.
        block_elements: elements of a block.
        activation_bytes: most bytes of activations at any moment.
        fixed_bytes: whatever else is on each device.
    """
    lanes = Lanes(LaneRules(shared_link=machine.collectives_share_link, slowdown=machine.collective_slowdown))
    lanes.run([_forward(g, c, machine) for g, c in zip(chunks, choices, strict=True)])
    lanes.run([_backward(g, c, machine) for g, c in zip(reversed(chunks), reversed(choices), strict=True)])
    both = sum(_link_bytes(g, c) for g, c in zip(chunks, choices, strict=True)) / machine.duplex_bytes_per_s
    update_s = sum(
        g.trainable / (machine.host_updates_per_s if c.on_host else machine.device_updates_per_s)
        for g, c in zip(chunks, choices, strict=True)
    )
    device, host = blocks * block_elements * max((g.compute_bytes for g in chunks), default=0), 0
    for g, c in zip(chunks, choices, strict=True):
        states = g.trainable * (g.stored_bytes + g.state_bytes)
        if g.is_root:
            device += g.elements * g.compute_bytes
            states += g.trainable * g.compute_bytes  # the shard of its gradient, updated with them
        elif c.on_host:
            host += g.elements * g.compute_bytes
        else:
            device += -(-g.elements * g.compute_bytes // machine.ranks)
        host += states if c.on_host else 0
        device += 0 if c.on_host else -(-states // machine.ranks)
    return ParallelOutcome(max(lanes.end_s, both) + update_s, device + activation_bytes + fixed_bytes, host, update_s)


def _before(g: ParameterGroup, c: GroupChoice, machine: ParallelMachine) -> tuple[float, float]:
    if g.is_root:
        return 0.0, 0.0
    nbytes = g.elements * g.compute_bytes
    return (nbytes / machine.reload_bytes_per_s if c.on_host else 0.0), machine.collective_s(nbytes)


def _forward(g: ParameterGroup, c: GroupChoice, machine: ParallelMachine) -> Use:
    leaves = c.on_host and not c.keep and not g.is_root
    evict_s = g.elements * g.compute_bytes / machine.offload_bytes_per_s if leaves else 0.0
    return Use(g.forward_s, *_before(g, c, machine), offload_s=evict_s)


def _backward(g: ParameterGroup, c: GroupChoice, machine: ParallelMachine) -> Use:
    before = (0.0, 0.0) if c.keep else _before(g, c, machine)
    gradients = g.trainable * g.compute_bytes
    reduce_s = machine.collective_s(gradients) * (
        2 if g.is_root else 1
    )  # the root's weights are gathered after updates
    return Use(g.backward_s, *before, reduce_s, gradients / machine.offload_bytes_per_s if c.on_host else 0.0)


def _link_bytes(g: ParameterGroup, c: GroupChoice) -> int:
    if not c.on_host:
        return 0
    times = 1 if g.is_root or c.keep else 3  # copied there, back, and there again
    return (times * g.elements + g.trainable) * g.compute_bytes
