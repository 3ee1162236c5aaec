"""Switches autocast off around parts of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off where it is on: backward and updates belong outside of it."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
