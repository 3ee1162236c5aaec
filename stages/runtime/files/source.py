"""Defines what tensors are read from by name: one file, a folder of files, or a part of what either has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class TensorSource(Protocol):
    """Tensors to read one at a time.

    Attributes:
        metadata: texts that were written with the tensors.
        forms: name -> a tensor on the meta device, of the dtype and shape of the one to read.
    """

    metadata: dict[str, str]

    @property
    def forms(self) -> Mapping[str, torch.Tensor]:
        """Return the forms of all tensors, by name."""

    def verify(self) -> None:
        """Read everything once and compare hashes.

        Raises:
            TableError: the content is not what was written.
        """

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own."""

    def read(self, name: str, target: torch.Tensor, first_row: int = 0) -> None:
        """Copy one tensor into `target`, of its dtype, in any layout and on any device.

        `target` has the shape of the tensor, or fewer rows (first dimension), which are read from `first_row` on.
        """
