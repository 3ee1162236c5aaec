"""Computes the memory that Elixir's search may use (A.1), and the least size of the rCache (A.3).

U_allowed = F_alloc · (capacity − U_buffer − F_frag · U_activation) (A.1)

Elixir's code takes away two things more, which the paper leaves out: what the driver holds, before the factor; and
after it, what the parameters take that are used twice (they are not in chunks).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AllowedMemory:
    """The memory of a device, and what of it is not for chunks.

    Attributes:
        capacity_bytes: all of the device's memory.
        buffer_bytes: buffers of the model (U_buffer).
        activation_bytes: most bytes of activations at any moment (U_activation).
        driver_bytes: what the driver and its libraries hold.
        whole_bytes: what parameters take that are in no chunk.
        alloc_share: the share of memory that can be used (F_alloc).
        fragment_factor: what activations take with fragments, over what they take without (F_frag).
    """

    capacity_bytes: int
    buffer_bytes: int
    activation_bytes: int
    driver_bytes: int = 2 << 30
    whole_bytes: int = 0
    alloc_share: float = 0.95
    fragment_factor: float = 1.25

    def allowed(self) -> int:
        """Return U_allowed; it is negative where activations alone are too many."""
        usable = self.capacity_bytes - self.driver_bytes - self.buffer_bytes
        return int(self.alloc_share * (usable - self.fragment_factor * self.activation_bytes)) - self.whole_bytes


def least_blocks(segment_elements: int, block_elements: int) -> int:
    """Return the fewest blocks that hold the parameters of any checkpointed segment, and the next chunk (A.3).

    Parameters of a segment may begin in one chunk and end in another, so that one block more is needed; with it, the
    chunk that is gathered ahead has a place too.
    """
    return -(-segment_elements // block_elements) + 1
