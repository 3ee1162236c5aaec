"""Changes the number of samples of a batch."""

from __future__ import annotations

from typing import Any

import torch

from stowage.stages.ir.errors import ParameterError
from stowage.stages.structure import parts, tensors_of, with_tensors

_PLAIN = (bool, int, float, str, type(None))


def samples_of(batch: Any) -> int:
    """Return the number of samples: the leading size of the first tensor that has one.

    Raises:
        ParameterError: there is no such tensor, or the batch holds something that is neither a tensor nor a number.
    """
    for part in parts(batch):
        if part.kind in ("array", "closed") or (part.kind == "plain" and not isinstance(part.item, _PLAIN)):
            raise ParameterError(
                f"The batch holds a {type(part.item).__name__}, so that it is not known how another number of samples "
                "would look: pass tensors in lists or dictionaries, or resize(batch, size) that makes a batch."
            )
    sizes = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim]
    if not sizes or not sizes[0]:
        raise ParameterError(
            "The batch has no tensor whose first dimension counts samples: pass one, or resize(batch, size) that makes "
            "a batch."
        )
    return int(sizes[0])


def resized(batch: Any, size: int) -> Any:
    """Return a batch of `size` samples: the first ones of `batch`, repeated where it has fewer.

    Tensors with as many rows as `batch` has samples are resized; others, such as positions of one row, stay as they
    are.

    Raises:
        ParameterError: see `samples_of`.
    """
    given = samples_of(batch)
    if size == given:
        return batch
    made: dict[int, torch.Tensor] = {}

    def rows(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.ndim or leaf.shape[0] != given:
            return leaf
        if id(leaf) not in made:  # if labels and inputs are one tensor, they stay one
            # A copy: a view would keep the memory of all rows alive.
            made[id(leaf)] = torch.cat([leaf] * -(-size // given))[:size].clone()
        return made[id(leaf)]

    return with_tensors(batch, [rows(tensor) for tensor in tensors_of(batch)])
