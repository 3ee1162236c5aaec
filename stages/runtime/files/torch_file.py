"""Writes files in the format of `torch.save`, one tensor at a time, for those who read them with `torch.load`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from stowage.stages.device.tiers.layout import is_dense
from stowage.stages.ir.files import atomic_file
from stowage.stages.runtime.files.tensor_file import Sink, Visitor

Lend = Callable[[torch.Tensor, Visitor], None]
"""Calls a function with the content of a tensor, given by the stand-in of that tensor."""


def write_torch(path: Path, item: Any, like: Callable[[torch.Tensor], torch.Tensor], lend: Lend) -> None:
    """Write nested containers with tensors atomically, with at most one tensor loaded into memory at a time.

    PyTorch writes everything but the bytes of tensors, for stand-ins without memory, and says where these bytes belong.

    Args:
        path: the file to write.
        item: the object that `torch.load` will give.
        like: gives shape, strides and dtype of a tensor of `item`, on the meta device.
        lend: calls a function with the content of a tensor.
    """
    leaves, structure = pytree.tree_flatten(item)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    forms = iter([like(tensor) for tensor in tensors])
    with atomic_file(path) as file:
        with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
            hollow = [_hollow(next(forms)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            torch.save(structure.unflatten(hollow), file)
            file.seek(0)
            found = pytree.tree_leaves(torch.load(file, weights_only=True))
        holes = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        sink = Sink(file)
        for tensor, hole in zip(tensors, holes, strict=True):
            file.seek(_offset(hole))
            lend(tensor, partial(_put, sink, hole))
        sink.sync()


def _hollow(like: torch.Tensor) -> torch.Tensor:
    """Make a tensor without memory on the CPU, where `torch.load` is to make it; call it inside of a fake mode."""
    stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return torch.empty_strided(like.shape, stride, dtype=like.dtype, device="cpu")


def _put(sink: Sink, hole: torch.Tensor, content: torch.Tensor) -> None:
    sink.write(_as_stored(content, hole))


def _offset(hole: torch.Tensor) -> int:
    storage: Any = hole.untyped_storage()
    return int(storage._checkpoint_offset)


def _as_stored(content: torch.Tensor, hole: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order in which they lie in memory."""
    if content.stride() == hole.stride():
        return content.as_strided((content.numel(),), (1,), content.storage_offset())
    laid_out = torch.empty_strided(hole.shape, hole.stride(), dtype=content.dtype, device=content.device)
    return laid_out.copy_(content).as_strided((content.numel(),), (1,))
