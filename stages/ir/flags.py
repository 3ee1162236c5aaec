"""Flags of kernels: which results they make, and whether what decides the way in which they compute trains.

What a kernel needs besides its arguments and results depends on its flags. So it is a table, in which bit i of a
position says whether flag i is set: the flags of a call are those results that the traced step asks for, in their
order, or the one that is the last argument of the operators in `BY_TRAINING`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

from stowage.stages.ir.by_training import BY_TRAINING

FLAGGED = frozenset(
    {
        "aten.convolution_backward.default",
        "aten.native_batch_norm_backward.default",
        "aten.native_group_norm_backward.default",
        "aten.native_layer_norm_backward.default",
    }
)
"""Kernels whose last argument has a flag for each result, `output_mask`; eager's engine sets it by what trains."""


_MADE_ANYWAY = {("aten.native_group_norm_backward.default", "cpu"): 0}
"""Results without which a kernel reads what is not there on some layouts, and ends the process: channels_last."""


def made_anyway(target: str, device: str) -> int:
    """Return the position of the result that a kernel in `FLAGGED` is always asked for on a device, or -1.

    Where nothing reads it, it is dropped at once, and counts as workspace.
    """
    return _MADE_ANYWAY.get((target, device), -1)


@lru_cache(maxsize=4096)
def asked_for(arguments: str) -> tuple[int, ...]:
    """Return the positions of the results that the traced step asks a kernel in `FLAGGED` for."""
    return tuple(i for i, flag in enumerate(json.loads(arguments)["args"][-1]) if flag is True)


def flag_count(target: str, arguments: str) -> int:
    """Return the number of flags of a call, 0 for most."""
    if target in FLAGGED:
        return len(asked_for(arguments))
    return 1 if target in BY_TRAINING else 0


def together(tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the table of several calls one after the other: the most of any; the flags of the first call come first.

    Args:
        tables: their tables; those of calls without flags have one entry.
    """
    found = [0]
    for table in tables:
        found = [max(before, own) for own in table for before in found]
    return tuple(found)
