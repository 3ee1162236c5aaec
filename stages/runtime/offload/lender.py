"""Defines who lends weights that are not whole on the device to a plain forward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Lender(Protocol):
    """Has weights that are not whole on the device, and lends them to modules that are called."""

    def settle_all(self) -> None:
        """Wait for all copies and updates."""

    def keep_to_limit(self) -> None:
        """Keep to the limit of memory, where there is one."""

    def offloaded_parameters(self) -> dict[str, torch.Tensor]:
        """Return what stands for these weights, by name."""

    def lending(self) -> AbstractContextManager[None]:
        """Allow calls of modules inside: the caller gives them what they read."""

    def like(self, name: str) -> torch.Tensor:
        """Return the layout of a weight, as a tensor on the meta device."""

    def peek(self, name: str) -> torch.Tensor:
        """Return a weight in new memory."""
