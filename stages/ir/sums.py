"""Which sums are written over a summand.

`c = add(a, b)` takes the memory of `a` (or `b`) where the plan frees that right afterwards: `c = add_(a, b)`. Addition
commutes, so every bit stays; eager's engine adds up gradients in the same way. Whether a summand dies there is the
plan's to say, so the referee, codegen and who predicts peaks all ask here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from stowage.stages.ir.graph import ComputeNode

SUM, SUM_IN_PLACE = "aten.add.Tensor", "aten.add_.Tensor"


def taken_memory(
    nodes: Sequence[ComputeNode], rows: Iterable[tuple[int, int]], moved: Collection[int]
) -> dict[int, int]:
    """Row of a sum -> the storage whose memory it takes.

    Args:
        nodes: the program's.
        rows: of each row of the plan the node it computes on the device and the storage it frees, or -1.
        moved: storages that leave the device for a time; a copy may still be reading them.
    """
    found: dict[int, int] = {}
    latest, takes = -1, list[int]()
    for number, (node, freed) in enumerate(rows):
        if node >= 0:
            latest, takes = number, [s for s in nodes[node].takes if s not in moved]
        elif freed in takes:
            found[latest] = min(freed, found.get(latest, freed), key=takes.index)
        elif freed < 0:
            takes = []
    return found
