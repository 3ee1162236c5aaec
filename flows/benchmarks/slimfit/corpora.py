"""Reads data that are on every machine: Python's own sources and documentation, and scikit-learn's digits."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from stowage.stages.ir.errors import ParameterError
from stowage.stages.workload.data import PYDOC_TOPICS, token_stream

PACKAGES = ("asyncio", "ctypes", "email", "http", "importlib", "multiprocessing", "unittest", "xml")
"""Packages of the standard library whose sources a classifier tells apart."""

HELD_OUT = 0.2
"""Share of every text, or of the pictures, that nothing trains on: its end."""


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _bytes_of(paths: Sequence[Path]) -> torch.Tensor:
    content = b"".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@lru_cache(maxsize=1)
def sources() -> torch.Tensor:
    """Return the standard library's modules, byte after byte; those of `PACKAGES` are not among them."""
    return _bytes_of(sorted(_library().glob("*.py")))


@lru_cache(maxsize=1)
def documentation() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the language reference that every Python has, byte after byte: what is trained on, and the rest."""
    return _split(token_stream(PYDOC_TOPICS))


@lru_cache(maxsize=1)
def packages() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the source of each of `PACKAGES`, byte after byte: what is trained on, and the rest.

    Every file is split, since a package has few.
    """
    kept: list[torch.Tensor] = []
    held_out: list[torch.Tensor] = []
    for name in PACKAGES:
        parts = [_split(_bytes_of([path])) for path in sorted((_library() / name).rglob("*.py")) if path.stat().st_size]
        kept.append(torch.cat([first for first, _ in parts]))
        held_out.append(torch.cat([rest for _, rest in parts]))
    return kept, held_out


@lru_cache(maxsize=1)
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scikit-learn's 1,797 digits: pictures (1,797, 1, 8, 8) from 0 to 1, and what they show.

    Raises:
        ParameterError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ParameterError("scikit-learn has the digits and is not installed: pip install scikit-learn.") from None
    found = load_digits()
    pictures = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    return pictures[order], torch.tensor(found.target)[order]


def windows(stream: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Return the windows of a stream that begin at `starts`, as int64 (windows, length)."""
    return stream[starts[:, None] + torch.arange(length)].long()


def _split(stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = int(len(stream) * (1 - HELD_OUT))
    return stream[:kept], stream[kept:]
