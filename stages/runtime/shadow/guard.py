"""Watches the operators of a plain forward: memory that they take, overwrite, or read although it is offloaded.

It sees every operator before it runs, so that the budget is kept and every write can be undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stowage.stages.runtime.shadow.operators import Facts, Operators, is_strided, leaves, taken_bytes

_STATISTICS = {
    torch.ops.aten.native_batch_norm.default: (3, 4, 5),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4, 5),
    torch.ops.aten.miopen_batch_norm.default: (3, 4, 5),
}
"""Positions of the running statistics, which the schema does not call written, and of the training flag."""


class NoRoom(BaseException):
    """Raised when a plain forward takes more memory than there is; no `Exception`, because a model may catch those.

    Attributes:
        nbytes: what it would have taken when it was stopped.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class ReadsOffloaded(BaseException):
    """Raised when a plain forward reads a parameter whose content is offloaded.

    Attributes:
        name: the parameter's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Saved:
    """Memory as it was before a write."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes that the saved memory takes."""
        return sum(copy.nbytes for _, copy in self._kept.values())

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._kept

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the memory itself, as bytes."""
        return (memory for memory, _ in self._kept.values())

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Copy a storage, once."""
        if storage._cdata not in self._kept:
            memory = whole(storage)
            self._kept[storage._cdata] = memory, memory.clone()

    def restore(self) -> None:
        """Write everything back, and forget it. No version counter changes: for autograd nothing has happened."""
        for memory, copy in self._kept.values():
            memory.copy_(copy)
        self._kept.clear()


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Room:
    """The memory that a plain forward may take.

    Attributes:
        nbytes: bytes in all.
        is_ample: True if there is so much that no call needs to be looked at before it runs.
        workspaces: operator -> bytes of scratch memory.
    """

    nbytes: int
    is_ample: bool = False
    workspaces: Mapping[str, int] = field(default_factory=dict)


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operators that run inside of it.

    Attributes:
        peak_bytes: the most that was in memory at once beyond what was there before, without `saved`.
        saved: memory that was there before and has been written, as it was.
    """

    def __init__(
        self,
        room: Room,
        offloaded: Mapping[int, str] | None = None,
        saved: Saved | None = None,
        known: Operators | None = None,
    ) -> None:
        """Take what the forward may do.

        Args:
            room: the memory that it may take.
            offloaded: `_cdata` of the storages that stand for offloaded parameters -> names.
            saved: takes what is about to be written.
            known: what earlier forwards have told of operators.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.saved = saved if saved is not None else Saved()
        self._room = room
        self._offloaded = offloaded or {}
        self._live: dict[int, tuple[Any, int]] = {}
        self._live_bytes = 0
        self._operators = known or Operators()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: operators inside of compiled regions are not seen, and a planned model has none."""
        return True

    def take(self, nbytes: int) -> None:
        """Count bytes that others are about to take, or raise `NoRoom`."""
        self._check(nbytes)

    def note(self, tensor: torch.Tensor) -> None:
        """Count new memory that is no operator's result."""
        self._note(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = self._operators.facts(func)
        if facts.is_view:
            return func(*args, **kwargs)
        storages = [t.untyped_storage() for t in leaves((args, kwargs)) if is_strided(t)]
        if self._offloaded:
            for storage in storages:
                if storage._cdata in self._offloaded:
                    raise ReadsOffloaded(self._offloaded[storage._cdata])
        self._before_writes(func, facts, args, kwargs)
        new_bytes = 0 if self._room.is_ample else self._operators.new_bytes(func, args, kwargs)
        self._check(new_bytes + self._room.workspaces.get(str(func), 0))
        result = func(*args, **kwargs)
        own = {storage._cdata for storage in storages}
        for tensor in leaves(result):
            if is_strided(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    self._note(storage)
        return result

    def _before_writes(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> None:
        written = [args[i] for i in facts.writes if i < len(args)]
        written += [kwargs[name] for name in facts.writes_keywords if name in kwargs]
        statistics = _STATISTICS.get(func)
        if statistics is not None and args[statistics[2]]:
            written += [args[i] for i in statistics[:2]]
        for tensor in leaves(written):
            if not is_strided(tensor):
                continue
            storage = tensor.untyped_storage()
            known = self._live.get(storage._cdata)
            if (known is None or known[0].expired()) and storage not in self.saved:
                self._check(storage.nbytes())
                self.saved.keep(storage)

    def _check(self, nbytes: int) -> None:
        """Refuse so many bytes more than there is room; count what was dropped only where it matters."""
        if self._live_bytes + nbytes > self.peak_bytes:
            for key in [k for k, (storage, _) in self._live.items() if storage.expired()]:
                self._live_bytes -= self._live.pop(key)[1]
            self.peak_bytes = max(self.peak_bytes, self._live_bytes + nbytes)
        total = self._live_bytes + nbytes + self.saved.nbytes
        if total > self._room.nbytes:
            raise NoRoom(total)

    def _note(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(storage._cdata)
        if known is not None:
            if not known[0].expired():
                return
            self._live_bytes -= known[1]
        nbytes = taken_bytes(storage)
        reference: Any = StorageWeakRef
        self._live[storage._cdata] = reference(storage), nbytes
        self._live_bytes += nbytes
        self._check(0)
