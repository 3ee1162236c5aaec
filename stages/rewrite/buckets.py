"""Puts small tensors of one block into buckets, which one collective exchanges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stowage.stages.ir.trace import Value

BUCKET_BYTES = 1 << 20
"""Weights, and gradients, are exchanged together until their bucket has so many bytes."""

ITEM_BYTES = {"float64": 8, "float32": 4, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
"""Bytes of an element by type; 2 for all others."""


def block_of(path: str) -> str:
    """Return the path of the repeated block that a module is in: up to the first number in it."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return path


def gradient_buckets(
    gradients: Mapping[str, int],
    completed: Mapping[str, int],
    values: Sequence[Value],
    whole: Mapping[str, Value],
    bucket_bytes: int,
    units: Mapping[str, int] | None = None,
) -> list[list[str]]:
    """Return the parameters whose gradients are scattered together, in the order in which they are complete.

    Args:
        gradients: the value of each parameter's gradient.
        completed: the call that completes each.
        values: all values.
        whole: parameters before they were sharded.
        bucket_bytes: a bucket is closed when it would have more.
        units: the unit of each parameter, where a part of them may be frozen: a bucket has parameters of one.
    """
    found: list[list[str]] = []
    before: tuple[str, str, int] = ("", "", -1)
    size = 0
    for name in sorted(gradients, key=lambda n: completed[n]):
        dtype = values[gradients[name]].dtype
        kind = block_of(name.rpartition(".")[0]), dtype, (units or {}).get(name, -1)
        nbytes = math.prod(whole[name].shape) * ITEM_BYTES.get(dtype, 2)
        if found and kind == before and size + nbytes <= bucket_bytes:
            found[-1].append(name)
            size += nbytes
        else:
            found.append([name])
            before, size = kind, nbytes
    return found
