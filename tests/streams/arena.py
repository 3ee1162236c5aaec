"""A device's memory as a caching allocator of one stream hands it out: freed memory is there again at once."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

SMALLEST = 512
POISON = 0xFF
"""Of memory that was never written: NaN as a float, -1 as an integer."""


class Block:
    """A piece of memory; tensors come and go in it.

    Attributes:
        address: where it is.
        memory: all of it, as bytes.
        owner: the name of what lives or last lived in it.
        written: whether its present tensor was written at all.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.owner = ""
        self.written = False
        self._storage = memory.untyped_storage()
        self._start = memory.storage_offset()

    def view(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        """A tensor in it that nobody follows: what queued work holds."""
        empty = torch.empty(0, dtype=dtype)
        start = self._start // dtype.itemsize + offset
        return empty.set_(self._storage, start, shape, stride)  # type: ignore[call-overload, no-any-return]


class Arena:
    """Memory in blocks of powers of two.

    `taken` and `freed` are called with a block when a tensor comes and when its last reference goes.

    Attributes:
        held: bytes of tensors that are there, rounded up to their blocks.
    """

    def __init__(self, taken: Callable[[Block], None], freed: Callable[[Block], None], nbytes: int = 1 << 28) -> None:
        self._all = np.empty(nbytes, dtype=np.uint8)
        self._end = -self._all.ctypes.data % SMALLEST
        self._from = self._all.ctypes.data
        self._to = self._from + nbytes
        self._blocks: dict[int, Block] = {}
        self._free: dict[int, list[Block]] = defaultdict(list)
        self._taken, self._freed = taken, freed
        self.held = 0

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Where a tensor of this device is; None for those of the host."""
        address = tensor.untyped_storage().data_ptr()
        return self._blocks[address] if self._from <= address < self._to else None

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor, with whatever is in its memory."""
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
        nbytes = span * dtype.itemsize
        if nbytes == 0:
            return torch.empty_strided(shape, stride, dtype=dtype)
        block = self._take(max(SMALLEST, 1 << (nbytes - 1).bit_length()))
        start = block.address - self._from
        memory = self._all[start : start + nbytes]
        weakref.finalize(memory, self._give, block).atexit = False
        self.held += block.memory.numel()
        self._taken(block)
        storage = torch.from_numpy(memory).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)  # type: ignore[call-overload, no-any-return]

    def _take(self, size: int) -> Block:
        if self._free[size]:
            return self._free[size].pop()
        start, self._end = self._end, self._end + size
        if self._end > self._all.nbytes:
            raise MemoryError("the model of a device is full")
        self._all[start : self._end] = POISON
        block = Block(torch.from_numpy(self._all[start : self._end]))
        self._blocks[block.address] = block
        return block

    def _give(self, block: Block) -> None:
        size = block.memory.numel()
        self.held -= size
        self._freed(block)
        self._free[size].append(block)
