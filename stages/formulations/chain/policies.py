"""Fixed policies as sequences of chain steps: the plans that any planner must beat."""

from __future__ import annotations

import math

from stowage.stages.formulations.chain.rk_rotor import ChainBlock, ChainStep


def segments(blocks: list[ChainBlock], size: int) -> list[ChainStep]:
    """Checkpoint every `size` blocks and recompute a segment before its backward; Chen et al. (2016) take √n.

    The last segment is run once, keeping everything.
    """
    fastest = [b.fastest for b in blocks]
    starts = list(range(0, len(blocks), size))
    steps: list[ChainStep] = []
    for start in starts[:-1]:
        steps += [ChainStep("fast", b) for b in range(start, start + size)]
    for start in reversed(starts):
        end = min(start + size, len(blocks))
        last = len(blocks) - 1
        steps += [ChainStep("forward", b, fastest[b], b == end - 1 != last) for b in range(start, end)]
        steps += [ChainStep("backward", b, fastest[b], b == end - 1 != last) for b in reversed(range(start, end))]
    return steps


def fixed_policies(blocks: list[ChainBlock]) -> dict[str, list[ChainStep]]:
    """Recompute every block, and Chen's √n checkpointing, where blocks may run without keeping anything."""
    if len(blocks) < 2 or any(math.isinf(b.fast_time_s) for b in blocks[:-1]):
        return {}
    return {
        "recompute_all": segments(blocks, 1),
        "chen_sqrt": segments(blocks, max(2, math.isqrt(len(blocks)))),
    }
