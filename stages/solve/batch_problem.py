"""Makes O-ILP's problem for a batch of one sample (thesis 4.5.3).

It separates what grows with the batch from what every batch pays once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from stowage.stages.formulations.chain.rk_rotor import ChainBlock
from stowage.stages.formulations.offload.problem import (
    OffloadBlock,
    OffloadOption,
    OffloadProblem,
    ParameterGroup,
    ParameterTensor,
)
from stowage.stages.solve.offload.offmate.problem import ChainProblem
from stowage.stages.solve.program.chain import Chain


def problem_of_one(
    problem: OffloadProblem,
    offmate: ChainProblem,
    chain: Chain,
    growing: Sequence[ChainBlock],
    batch_bytes: int,
    sample: int,
) -> OffloadProblem:
    """Return O-ILP's problem for a batch of 1.

    Args:
        problem: the problem for `sample` samples; its options are those of `offmate.choices`.
        offmate: made `problem`.
        chain: the chain for `sample` samples.
        growing: the part of the chain that grows; see `growing_chain`.
        batch_bytes: the part of `problem`'s fixed bytes that is proportional to the batch: inputs, and shared values.
        sample: samples of the batch that was traced.
    """
    each = math.ceil(batch_bytes / sample)
    apart = _apart(problem, offmate, chain)
    blocks = []
    for b, block in enumerate(problem.blocks):
        whole, part = chain.chain_blocks[b].options, growing[b].options
        costs = [(whole[c.option], part[c.option]) for c in offmate.choices[b]]
        fixed = min(w.backward_peak_bytes - p.backward_peak_bytes for w, p in costs)
        # `problem` counts the updates of small tensors in backward; here a group of their own has them.
        small_s = sum(chain.nodes[n].time_s for n in apart if chain.nodes[n].block == b)

        def one(option: OffloadOption, fixed: int = fixed, small_s: float = small_s) -> OffloadOption:
            return OffloadOption(
                forward_time_s=option.forward_time_s / sample,
                backward_time_s=max(0.0, option.backward_time_s - small_s) / sample,
                save_bytes=math.ceil(option.save_bytes / sample),
                forward_peak_bytes=math.ceil(option.forward_peak_bytes / sample) + each,
                backward_peak_bytes=math.ceil((option.backward_peak_bytes - fixed) / sample) + fixed + each,
                offload_bytes=math.ceil(option.offload_bytes / sample),
            )

        blocks.append(
            OffloadBlock(
                options=tuple(map(one, block.options)),
                forward_resident_bytes=block.forward_resident_bytes,
                backward_resident_bytes=block.backward_resident_bytes,
                fixed_backward_bytes=fixed,
            )
        )
    return replace(
        problem,
        blocks=tuple(blocks),
        groups=(*problem.groups, *_other_updates(problem, offmate, chain)),
        machine=replace(problem.machine, fixed_bytes=problem.machine.fixed_bytes - batch_bytes),
    )


def _apart(problem: OffloadProblem, offmate: ChainProblem, chain: Chain) -> list[int]:
    """Return the update nodes of parameters that no group has."""
    moved = {offmate.parameter[t.name] for group in problem.groups for t in group.tensors}
    return [n.node for n in chain.nodes if n.phase == "update" and moved.isdisjoint(n.mutates)]


def _other_updates(problem: OffloadProblem, offmate: ChainProblem, chain: Chain) -> list[ParameterGroup]:
    """Return the time of updates that no group has, those of small tensors and clipping: every batch pays it once."""
    left = [0.0] * problem.L
    for number in _apart(problem, offmate, chain):
        node = chain.nodes[number]
        left[max(node.block, 0)] += node.time_s
    return [
        ParameterGroup(f"updates {b}", (b,), (), (ParameterTensor(f"updates {b}", 0, device_update_s=seconds),))
        for b, seconds in enumerate(left)
        if seconds
    ]
