"""A tier that transfers nothing in the background: it checks the order of verbs and the memory between them."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from stowage.stages.device.tiers.base import OFFLOAD, RELOAD, HostMemory, Span, Stream
from stowage.stages.device.tiers.layout import check_movable, flat_bytes, is_dense, packed
from stowage.stages.device.tiers.slots import Slots
from stowage.stages.ir.errors import IllegalPlanError

GARBAGE = 0xFF
"""Byte that fills destinations until the wait: NaN in every floating-point type, -1 in integers."""


@dataclass(frozen=True)
class Verb:
    """One call of a verb."""

    verb: Literal["offload", "reload", "wait"]
    name: str
    nbytes: int


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with garbage that shows in every result."""
    tensor = tensor.detach()
    if is_dense(tensor):
        flat_bytes(tensor).fill_(GARBAGE)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the elements' bytes, in row-major order if the tensor is not dense."""
    whole = (tensor.detach() if is_dense(tensor) else packed(tensor)).cpu()
    if whole.numel() == 0:
        return 0
    nbytes = whole.numel() * whole.element_size()
    return zlib.crc32((ctypes.c_char * nbytes).from_address(whole.data_ptr()))


class _NullTransfer:
    """A transfer that was begun: its wait does the copy, and checks that nobody read or wrote the memory before."""

    def __init__(self, tier: NullTier, stream: Stream, name: str, tensor: torch.Tensor, content: torch.Tensor) -> None:
        self.stream: Stream = stream
        self.name = name
        self.content = content
        self.tensor: torch.Tensor | None = tensor
        self.storage_bytes = tensor.untyped_storage().nbytes()
        self.checksum = checksum(tensor)
        self._tier = tier

    def done(self) -> bool:
        """Return False until the wait, which does the copy."""
        return self.tensor is None

    def wait(self) -> None:
        """Implement `Transfer.wait`.

        Raises:
            IllegalPlanError: it was waited for already, or its tensor was freed or written before the wait.
        """
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise IllegalPlanError(f"Wait for '{self.name}': no transfer of it is under way.")
        self._tier._waited(self, tensor)
        if tensor.untyped_storage().nbytes() != self.storage_bytes:
            raise IllegalPlanError(f"'{self.name}' was freed before the wait for its {self.stream}.")
        if checksum(tensor) != self.checksum:
            raise IllegalPlanError(f"'{self.name}' was written before the wait for its {self.stream}.")
        if self.stream == RELOAD:
            if is_dense(tensor):
                flat_bytes(tensor.detach()).copy_(self.content)
            else:
                tensor.detach().copy_(self.content.view(tensor.dtype).view(tensor.shape))


class NullTier(HostMemory):
    """A `Tier` that keeps bytes in plain memory; mistakes in the order of verbs raise at once.

    Attributes:
        verbs: everything that was asked for, in order.
    """

    name = "null"

    def __init__(self, *, garbage: bool = True) -> None:
        """With `garbage`, fill destinations of reloads until the wait, so that reading too early shows."""
        self.record = False
        self.verbs: list[Verb] = []
        self._garbage = garbage
        self._slots = Slots()
        self._content: dict[str, torch.Tensor] = {}
        self._pending: list[_NullTransfer] = []

    @property
    def memory_alignment(self) -> int:
        """Implement `Tier.memory_alignment`."""
        return 0

    @property
    def staging_bytes(self) -> int:
        """Return 0: this tier is for tests, and has nothing that a budget counts."""
        return 0

    @property
    def spans(self) -> Sequence[Span]:
        """Return no spans: nothing takes time."""
        return ()

    @property
    def unwaited(self) -> list[str]:
        """Return the names of transfers that were begun and not waited for, in order."""
        return [transfer.name for transfer in self._pending]

    def reserve(self, slots: Mapping[str, int], on_disk: Collection[str] = ()) -> None:
        """Implement `Tier.reserve`."""
        del on_disk
        self._slots.add(self._slots.new(slots))

    def release(self, names: Collection[str]) -> None:
        """Implement `Tier.release`."""
        self._slots.drop(names)
        for name in names:
            self._content.pop(name, None)

    def offload(self, name: str, tensor: torch.Tensor) -> _NullTransfer:
        """Implement `Tier.offload`.

        Raises:
            IllegalPlanError: a reload into this memory was not waited for.
        """
        check_movable(name, tensor, ("cpu", "cuda"))
        self._not_pending(OFFLOAD, name, tensor, (RELOAD,))
        self._slots.write(name, tensor)
        source = flat_bytes(tensor.detach()) if is_dense(tensor) else flat_bytes(packed(tensor))
        content = source.to("cpu", copy=True)
        self._content[name] = content
        return self._begin(OFFLOAD, name, tensor, content)

    def reload(self, name: str, tensor: torch.Tensor) -> _NullTransfer:
        """Implement `Tier.reload`.

        Raises:
            IllegalPlanError: the name was never offloaded, or a transfer of this memory was not waited for.
        """
        check_movable(name, tensor, ("cpu", "cuda"))
        self._not_pending(RELOAD, name, tensor, (OFFLOAD, RELOAD))
        self._slots.read(name, tensor)
        if self._garbage:
            poison(tensor)
        return self._begin(RELOAD, name, tensor, self._content[name])

    def wait(self, name: str) -> None:
        """Wait for the oldest transfer of a name.

        Raises:
            IllegalPlanError: there is none.
        """
        for transfer in self._pending:
            if transfer.name == name:
                return transfer.wait()
        raise IllegalPlanError(f"Wait for '{name}': no transfer of it is under way.")

    def content(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Implement `Tier.content`."""
        nbytes = like.numel() * like.element_size()
        if name not in self._content:
            self._content[name] = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        view = self._content[name][:nbytes].view(like.dtype).as_strided(like.shape, like.stride())
        self._slots.write(name, view)
        return view

    def written(self, name: str) -> bool:
        """Implement `Tier.written`."""
        return self._slots.written(name)

    def close(self) -> None:
        """Implement `Tier.close`."""
        self._content.clear()
        self._pending.clear()

    def _begin(self, stream: Stream, name: str, tensor: torch.Tensor, content: torch.Tensor) -> _NullTransfer:
        transfer = _NullTransfer(self, stream, name, tensor, content)
        self._pending.append(transfer)
        self.verbs.append(Verb(stream, name, tensor.numel() * tensor.element_size()))
        return transfer

    def _waited(self, transfer: _NullTransfer, tensor: torch.Tensor) -> None:
        self._pending = [other for other in self._pending if other is not transfer]
        self.verbs.append(Verb("wait", transfer.name, tensor.numel() * tensor.element_size()))

    def _not_pending(self, verb: Stream, name: str, tensor: torch.Tensor, streams: tuple[Stream, ...]) -> None:
        for other in self._pending:
            if other.stream in streams and other.tensor is not None and _overlap(other.tensor, tensor):
                raise IllegalPlanError(
                    f"{verb.capitalize()} of '{name}': the {other.stream} of '{other.name}' in the same memory was not "
                    "waited for."
                )


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    def extent(tensor: torch.Tensor) -> tuple[int, int]:
        reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()

    if one.device != two.device or not one.numel() or not two.numel():
        return False
    (a, b), (c, d) = extent(one), extent(two)
    return a < d and c < b
