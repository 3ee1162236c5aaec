"""The fixed policy of offloading everything: each step's parameters and states come just before it and leave after."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.solve.offload.insertion import StepMoves


def stream_everything(
    needs: Sequence[frozenset[int]], *, ahead: int, lag: int
) -> tuple[list[StepMoves], frozenset[int]]:
    """Moves of each step, and what is below when an iteration starts.

    Args:
        needs: of each step the movable storages that it uses.
        ahead: steps by which a reload precedes its use; 0 for none.
        lag: steps that a storage stays after its use, so that its copy can go down meanwhile.
    """
    count = len(needs)
    present = [frozenset[int]().union(*(needs[(t - k) % count] for k in range(-ahead, lag + 1))) for t in range(count)]
    moves = [
        StepMoves(
            free=tuple(sorted(present[t - 1] - present[t])),
            reload=tuple(sorted(present[t] - present[t - 1])),
            offload=tuple(sorted(needs[t])),
        )
        for t in range(count)
    ]
    everything = frozenset[int]().union(*needs)
    return moves, everything - present[-1]
