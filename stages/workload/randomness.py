"""Draws under a seed and leaves every global generator as it was."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from stowage.stages.structure.generators import forked_generators


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch (CPU and CUDA), NumPy and `random` inside; restore all of them on the way out, errors included."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with forked_generators():
        try:
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def generator(*numbers: int) -> torch.Generator:
    """Return a new generator for a tuple of integers; neighbouring tuples give unrelated draws."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
