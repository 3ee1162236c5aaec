"""Chooses the length of chunks, the blocks of the rCache, and how many chunks are on the device (5.1, A.2, A.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stowage.stages.formulations.sharding.elixir.allowed import BLOCKS_AHEAD, least_blocks
from stowage.stages.formulations.sharding.elixir.benefit import MIXED_PRECISION, Widths, block_benefit, chunk_benefit
from stowage.stages.formulations.sharding.elixir.chunks import lengths, pack
from stowage.stages.formulations.sharding.elixir.rcache import loads
from stowage.stages.ir.parallel import ParallelMachine


@dataclass(frozen=True)
class ElixirPlan:
    """What the search found.

    Attributes:
        length: elements of a chunk (C).
        chunks: positions of the parameters of each chunk.
        blocks: blocks of the rCache (n_block).
        least_blocks: the fewest that the search allows itself.
        on_device: chunks whose shards are on the devices, the first ones.
        whole_on_device: so are the shards of the parameters that are used twice; they come last.
        fits: the rCache is as long as checkpointed segments need (A.3).
    """

    length: int
    chunks: tuple[tuple[int, ...], ...]
    blocks: int
    least_blocks: int
    on_device: int
    whole_on_device: bool
    fits: bool

    @property
    def kept(self) -> int:
        """Return how many chunks, the last ones, stay gathered from forward to backward."""
        return max(0, min(self.blocks - self.least_blocks, len(self.chunks)))


def search(
    elements: Sequence[int],
    allowed_bytes: int,
    machine: ParallelMachine,
    *,
    segment_elements: int,
    whole_elements: int = 0,
    widths: Widths = MIXED_PRECISION,
) -> ElixirPlan:
    """Choose a configuration.

    Args:
        elements: size of each parameter, in the order of forward, without those that are used twice.
        allowed_bytes: U_allowed.
        machine: the machine.
        segment_elements: most elements of the parameters of one checkpointed segment.
        whole_elements: elements of the parameters that are used twice.
        widths: bytes of an element.
    """
    length, chunks = _best_length(elements, allowed_bytes, widths)
    block_bytes = length * widths.compute_bytes
    shard_bytes = -(-length * widths.resident_bytes // machine.ranks)
    count = len(chunks)
    least = min(least_blocks(segment_elements, length), count)
    affordable = max(0, allowed_bytes) // block_bytes
    parts = tuple(tuple(chunk) for chunk in chunks)
    if affordable < least:
        return ElixirPlan(length, parts, affordable, least, 0, whole_on_device=False, fits=False)
    whole_bytes = -(-whole_elements * widths.resident_bytes // machine.ranks)
    room = allowed_bytes - least * block_bytes
    if chunk_benefit(machine, widths) > block_benefit(machine, widths):
        on_device = min(count, room // shard_bytes)
        room -= on_device * shard_bytes
        whole_on_device = whole_bytes <= room
        more = min(count - least, (room - whole_on_device * whole_bytes) // block_bytes)
    else:
        more = min(count - least, room // block_bytes)
        room -= more * block_bytes
        on_device = min(count, room // shard_bytes)
        whole_on_device = whole_bytes <= room - on_device * shard_bytes
    return ElixirPlan(length, parts, least + more, least, on_device, whole_on_device, fits=True)


def _best_length(elements: Sequence[int], allowed_bytes: int, widths: Widths) -> tuple[int, list[list[int]]]:
    """Return the length with the fewest bytes loaded into the rCache, and its chunks (A.2)."""
    best: tuple[int, int, list[list[int]]] | None = None
    for length in lengths(elements):
        chunks = pack(elements, length)
        blocks = allowed_bytes // (length * widths.compute_bytes) - BLOCKS_AHEAD
        blocks = max(1, min(len(chunks), blocks))
        calls = [*range(len(chunks)), *reversed(range(len(chunks)))]
        loaded = loads(calls, blocks) * length
        if best is None or loaded < best[0]:
            best = (loaded, length, chunks)
    assert best is not None
    return best[1], best[2]
