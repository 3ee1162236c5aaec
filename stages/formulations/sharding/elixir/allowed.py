"""Computes the memory that Elixir's search may use (A.1), and the least size of the rCache (A.3).

U_allowed = F_alloc · (capacity − U_buffer − F_frag · U_activation) (A.1)

Elixir's code takes away three things more, which the paper leaves out: what the driver holds, before the factor; and
after it, the parameters that are used twice (they are not in chunks, and stay whole), and a buffer that holds those of
any one module.
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
        whole_bytes: parameters that are used twice, and the buffer for those of a module.
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


FEWEST_BLOCKS = 4
"""Blocks that the authors' code takes at least."""

BLOCKS_AHEAD = 2
"""Blocks that it takes more, for chunks that are gathered ahead."""


def least_blocks(segment_elements: int, block_elements: int) -> int:
    """Return the fewest blocks that hold the parameters of any checkpointed segment (A.3), as the authors' code does.

    Parameters of a segment may begin in one chunk and end in another, so that one block more is needed.
    """
    return max(FEWEST_BLOCKS, -(-segment_elements // block_elements) + 1) + BLOCKS_AHEAD
