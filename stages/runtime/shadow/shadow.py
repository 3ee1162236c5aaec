"""Runs the user's own forward and loss in plain PyTorch, keeps nothing for backward and leaves nothing behind.

The kernels are those of training: the gradient mode is on, and autograd is handed what it wants to save, which is
dropped at once. So it takes little more memory than a forward without gradients.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stowage.stages.runtime.offload.lender import Lender
from stowage.stages.runtime.random.generators import GeneratorStates
from stowage.stages.runtime.random.python_state import PythonState
from stowage.stages.runtime.shadow.guard import Guard, NoRoom, Room, Saved
from stowage.stages.runtime.shadow.operators import Operators
from stowage.stages.runtime.shadow.weights import Lending

Compute = Callable[[nn.Module, Any], Any]
"""Computes the loss, or whatever is compared, from the model and the batch."""


@dataclass(frozen=True)
class Number:
    """A loss, without the tensor: its bits, and how people read it."""

    dtype: torch.dtype
    bits: bytes
    value: float
    text: str

    @staticmethod
    def of(loss: torch.Tensor) -> Number:
        """Return a loss as a number; all NaN are equal."""
        value = loss.detach().reshape(()).cpu()
        if value.isnan():
            return Number(value.dtype, b"NaN", math.nan, "NaN")
        digits = {torch.float64: 17, torch.float32: 9}.get(value.dtype, 5)
        number = float(value)
        bits = value.reshape(1).view(torch.uint8).numpy().tobytes()
        return Number(value.dtype, bits, number, f"{number:.{digits}g}")


@dataclass(frozen=True)
class ShadowSeen:
    """The results of a plain forward.

    Attributes:
        result: what `Shadow.outcome` makes of the forward's result: for a loss a `Number`.
        generators: states of the generators after it.
        buffers: hashes of the buffers that it wrote, by name.
    """

    result: Any
    generators: GeneratorStates
    buffers: dict[str, bytes]


class _Kept(BaseException):
    """Raised when a dropped tensor is asked for: the forward differentiates something itself."""


@dataclass
class Shadow:
    """The plain forward of one program.

    Attributes:
        compute: the user's model and loss.
        roots: objects, besides the model, from which the Python state is reached that the forward may write.
        known: what other programs' runs have told of operators.
        reads: module -> parameters that it reads itself.
        outcome: makes of the result what is compared; the result's tensors are dropped.
        gradients: whether the gradient mode is on.
        kernels: inside it operators are eager's, although they are looked at.
        peak_bytes: bytes of the latest run, beyond what was there before; 0 before the first.
    """

    model: nn.Module
    compute: Compute
    roots: tuple[Any, ...] = ()
    known: Operators = field(default_factory=Operators)
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)
    outcome: Callable[[Any], Any] = Number.of
    gradients: bool = True
    kernels: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    peak_bytes: int = 0
    _drops: bool = True
    _written: tuple[str, ...] | None = None

    def run(self, batch: Any, room: Room, offloading: Lender | None) -> ShadowSeen:
        """Run the forward within `room`; generators, buffers, attributes and gradients are afterwards as before.

        Raises:
            NoRoom, ReadsOffloaded: it cannot be run here and now; nothing is left behind then either.
        """
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if offloading is not None:
            offloading.settle_all()  # a copy that ended meanwhile would be undone
        generators = GeneratorStates.now(device)
        state = PythonState((self.model, self.compute, *self.roots, batch))
        torch.clear_autocast_cache()
        try:
            return self._run(batch, room, offloading, generators, state)
        finally:
            torch.clear_autocast_cache()

    def _run(
        self,
        batch: Any,
        room: Room,
        offloading: Lender | None,
        generators: GeneratorStates,
        state: PythonState,
    ) -> ShadowSeen:
        light = self._written is not None and self.peak_bytes <= room.nbytes and offloading is None
        while True:
            saved = Saved()
            try:
                if light:
                    return self._lightly(batch, saved, generators.device)
                return self._guarded(batch, saved, room, offloading, generators.device)
            except _Kept:
                self._drops = False
            except torch.OutOfMemoryError:
                raise NoRoom(room.nbytes) from None
            except RuntimeError as error:
                if not self._drops or "saved tensor hooks" not in str(error):
                    raise
                self._drops = False  # `torch.func` allows no such hooks
            finally:
                saved.restore()
                state.restore()
                generators.restore()

    def _lightly(self, batch: Any, saved: Saved, device: torch.device | None) -> ShadowSeen:
        """Run without looking at operators: an earlier run has told what the forward takes and writes."""
        buffers = dict(self.model.named_buffers())
        for name in self._written or ():
            saved.keep(buffers[name].untyped_storage())
        return self._seen(self._result(batch), saved, device)

    def _guarded(
        self, batch: Any, saved: Saved, room: Room, offloading: Lender | None, device: torch.device | None
    ) -> ShadowSeen:
        lending = Lending(self.model, offloading, self.reads) if offloading is not None else None
        guard = Guard(room, lending.offloaded if lending is not None else None, saved, self.known)
        with guard, self.kernels(), lending.around(guard) if lending is not None else contextlib.nullcontext():
            result = self._result(batch)
        seen = self._seen(result, saved, device)
        self.peak_bytes = guard.peak_bytes + saved.nbytes
        known = {buffer.untyped_storage()._cdata for buffer in self.model.buffers()}
        if all(memory.untyped_storage()._cdata in known for memory in saved) and self._drops:
            self._written = tuple(seen.buffers)
        return seen

    def _seen(self, result: Any, saved: Saved, device: torch.device | None) -> ShadowSeen:
        buffers = {
            name: digest(buffer) for name, buffer in self.model.named_buffers() if buffer.untyped_storage() in saved
        }
        return ShadowSeen(result, GeneratorStates.now(device or torch.device("cpu")), buffers)

    def _result(self, batch: Any) -> Any:
        drops = self._drops and self.gradients
        with torch.set_grad_enabled(self.gradients), _dropping() if drops else contextlib.nullcontext():
            return self.outcome(self.compute(self.model, batch))


@contextlib.contextmanager
def _dropping() -> Iterator[None]:
    def drop(_tensor: torch.Tensor) -> None:
        return None

    def ask(_nothing: None) -> torch.Tensor:
        raise _Kept

    with torch.autograd.graph.saved_tensors_hooks(drop, ask):
        yield


def digest(tensor: torch.Tensor) -> bytes:
    """Return a hash of a tensor's numbers."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content: Any = flat.numpy()
    return hashlib.blake2b(content, digest_size=16).digest()
