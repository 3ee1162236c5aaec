"""Bytes that are in memory under some masks: what one row of a plan that freezes takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class MaskedBytes:
    """The bytes in memory at one row, as a function of the mask: the sum over guards that the mask has something of.

    Attributes:
        row: the row's position.
        by_guard: bytes of each guard; those of `ALWAYS` are there under every mask.
    """

    row: int
    by_guard: Mapping[int, int]

    @cached_property
    def total(self) -> int:
        """Return the bytes where everything trains."""
        return sum(self.by_guard.values())

    def under(self, mask: int) -> int:
        """Return the bytes under a mask."""
        return sum(nbytes for guard, nbytes in self.by_guard.items() if guard & mask)
