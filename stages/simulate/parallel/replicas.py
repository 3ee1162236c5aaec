"""Simulates DDP, which keeps everything on every device, and FSDP with the whole model as one unit.

The latter is what the authors of Elixir measured: FairScale's, with the model wrapped as a whole. With mixed precision
both have weights and gradients in the type of computing, and the float32 master and states beside.
"""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.parallel import ParallelMachine, ParameterGroup
from stowage.stages.simulate.parallel.lanes import LaneRules, Lanes, Use
from stowage.stages.simulate.parallel.outcome import ParallelOutcome


def simulate_ddp(
    groups: Sequence[ParameterGroup], machine: ParallelMachine, *, activation_bytes: int, fixed_bytes: int = 0
) -> ParallelOutcome:
    """Simulate DDP: gradients are all-reduced while backward computes, and every rank updates everything.

    An all-reduce takes the time of a reduce-scatter and an all-gather.
    """
    lanes = Lanes(LaneRules(ahead=0, slowdown=machine.collective_slowdown))
    lanes.run([Use(g.forward_s) for g in groups])
    lanes.run(
        [
            Use(g.backward_s, reduce_s=2 * machine.collective_s(g.trainable * g.compute_bytes) if g.trainable else 0.0)
            for g in reversed(groups)
        ]
    )
    trainable = sum(g.trainable for g in groups)
    update_s = machine.ranks * trainable / machine.device_updates_per_s
    device = sum(
        g.elements * g.compute_bytes + g.trainable * (g.compute_bytes + g.stored_bytes + g.state_bytes) for g in groups
    )
    return ParallelOutcome(lanes.end_s + update_s, device + activation_bytes + fixed_bytes, 0, update_s)


def simulate_one_unit(
    groups: Sequence[ParameterGroup], machine: ParallelMachine, *, activation_bytes: int, fixed_bytes: int = 0
) -> ParallelOutcome:
    """Simulate FSDP with the whole model as one unit: gathered before forward, reduced after backward.

    The shards of weights (float32, and again in the type of computing), gradients and states are beside the whole
    weights and the whole gradients. With one rank the shards are the whole.
    """
    weights = sum(g.elements * g.compute_bytes for g in groups)
    gradients = sum(g.trainable * g.compute_bytes for g in groups)
    shards = sum(
        g.elements * (g.stored_bytes + g.compute_bytes) + g.trainable * (g.stored_bytes + g.state_bytes) for g in groups
    )
    lanes = Lanes(LaneRules(ahead=0))
    lanes.run([Use(sum(g.forward_s for g in groups), gather_s=machine.collective_s(weights))])
    lanes.run([Use(sum(g.backward_s for g in groups), reduce_s=machine.collective_s(gradients))])
    update_s = sum(g.trainable for g in groups) / machine.device_updates_per_s
    device = -(-shards // machine.ranks) + (weights + gradients if machine.ranks > 1 else 0)
    return ParallelOutcome(lanes.end_s + update_s, device + activation_bytes + fixed_bytes, 0, update_s)
