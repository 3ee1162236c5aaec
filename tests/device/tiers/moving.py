"""What tests of tiers share: tensors with known bytes, at addresses of choice."""

from __future__ import annotations

import torch

PAGE = 4096


def random_bytes(nbytes: int, seed: int = 0, *, behind_page: int | None = None) -> torch.Tensor:
    """Flat random bytes; with `behind_page`, at so many bytes behind a page's start."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)
    return content if behind_page is None else placed(content, behind_page)


def placed(content: torch.Tensor, behind_page: int) -> torch.Tensor:
    """A copy at an address."""
    memory = torch.empty(content.numel() + 2 * PAGE, dtype=torch.uint8)
    start = (behind_page - memory.data_ptr()) % PAGE
    return memory[start : start + content.numel()].copy_(content)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order: equal where `torch.equal` may not be (NaN)."""
    flat = tensor.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
    return bytes(flat.tolist())
