"""Decides which bytes of a tensor are transferred.

A tensor without holes or overlaps, in any order of its dimensions, is transferred as the bytes of its storage: no copy
is made, and it is reloaded into the same strides. Any other (a slice with gaps, an expanded or lazily conjugated
tensor) is packed: its contiguous copy is transferred, whose bytes are extra memory until the transfer's wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stowage.stages.ir.errors import IllegalPlanError, StowageError


@dataclass(frozen=True)
class TransferLayout:
    """The mapping of a slot's bytes to elements.

    Attributes:
        nbytes: bytes of the elements.
        order: (dtype, shape, strides) where strides matter; None for elements in row-major order.
        raw: a flat tensor of bytes, which fits any layout of as many bytes.
    """

    nbytes: int
    order: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None
    raw: bool

    def fits(self, written: TransferLayout) -> bool:
        """Return whether bytes written with the layout `written` mean the same when read with this one."""
        return self.nbytes == written.nbytes and (self.raw or written.raw or self.order == written.order)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements are a range of the storage's bytes: no holes, no overlaps, no lazy bits."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def layout_of(tensor: torch.Tensor) -> TransferLayout:
    """Return the layout that a slot has after `tensor` is offloaded into it."""
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous() or not is_dense(tensor):
        return TransferLayout(nbytes, None, tensor.dtype == torch.uint8 and tensor.dim() == 1)
    return TransferLayout(nbytes, (tensor.dtype, tuple(tensor.shape), tensor.stride()), False)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, as a flat tensor over the same storage."""
    nbytes, start = tensor.numel() * tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (nbytes,))  # type: ignore[call-overload, no-any-return]


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def check_movable(name: str, tensor: torch.Tensor, kinds: tuple[str, ...]) -> None:
    """Raise unless `tensor` has plain memory on one of the devices `kinds`."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type not in kinds:
        what = f"a tensor on {tensor.device.type}" if plain else f"a tensor with layout {tensor.layout}"
        raise StowageError(f"'{name}' cannot be offloaded: {what}, and only strided ones on {' or '.join(kinds)} can.")
    need = (tensor.storage_offset() * tensor.element_size()) + tensor.numel() * tensor.element_size()
    if is_dense(tensor) and tensor.untyped_storage().nbytes() < need:
        raise IllegalPlanError(f"'{name}' was freed before it is moved: its storage is smaller than the tensor.")
