"""Says what measuring a weight's move takes beside the copy of the weight, see `runtime.moves`."""

from __future__ import annotations

CHUNK = 1 << 16
"""Elements that are taken at a time, where they do not stay as they are."""

_NARROW = 4
"""Types of fewer bytes are summed in float32."""

_REDUCED_BYTES = {"cpu": 1 << 10}
"""Bytes of the sums, and of what the device's threads sum up by themselves."""

_REDUCED_ELSEWHERE_BYTES = 1 << 16


def taken_at_once(numel: int, itemsize: int, device: str, *, relative: bool) -> int:
    """Return how many elements are taken at a time.

    Sums of absolute values need nothing beside them, but a CPU converts narrow types before it sums.
    """
    return min(numel, CHUNK) if relative or (device == "cpu" and itemsize < _NARROW) else numel


def scratch_bytes(numel: int, itemsize: int, device: str, *, relative: bool) -> int:
    """Return the bytes that measuring the move of a weight takes beside the copy of it."""
    narrow = itemsize < _NARROW
    each = 0
    if relative:  # a quotient and whether it counts; for narrow types the quotient and an argument in float32
        each = 2 * _NARROW if narrow else itemsize + 1
    elif narrow and device == "cpu":
        each = _NARROW
    at_once = taken_at_once(numel, itemsize, device, relative=relative)
    return each * at_once + _REDUCED_BYTES.get(device, _REDUCED_ELSEWHERE_BYTES)
