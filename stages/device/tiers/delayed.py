"""Starts the transfers of one stream late, for tests: a missing wait then shows in the numbers.

Destinations of reloads contain garbage from the call until the bytes arrive. A late offload takes what is in its
tensor when it starts, so a tensor overwritten before the wait is stored wrong.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from stowage.stages.device.tiers.base import OFFLOAD, RELOAD, HostMemory, Span, Stream, Tier, Transfer
from stowage.stages.device.tiers.layout import check_movable
from stowage.stages.device.tiers.null import poison


class _Late:
    """A transfer that its tier has perhaps not begun yet."""

    def __init__(self, stream: Stream, name: str, begin: Callable[[], Transfer]) -> None:
        self.stream: Stream = stream
        self.name = name
        self.begun = threading.Event()
        self._begin: Callable[[], Transfer] | None = begin
        self._transfer: Transfer | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begin the transfer."""
        begin, self._begin = self._begin, None
        assert begin is not None
        try:
            self._transfer = begin()
        except BaseException as error:
            self._error = error
        del begin
        self.begun.set()

    def wait(self) -> None:
        """Implement `Transfer.wait`."""
        self.begun.wait()
        if self._error is not None:
            raise self._error
        assert self._transfer is not None
        self._transfer.wait()

    def done(self) -> bool:
        """Implement `Transfer.done`."""
        return self.begun.is_set() and (self._transfer is None or self._transfer.done())


class DelayedTier:
    """A `Tier` like `inner`, but each transfer of `stream` starts `seconds` after its turn.

    The order within a stream and within a slot is kept: a transfer of the other stream starts at once unless it, or one
    before it in its stream, needs a slot whose turn has not come.
    """

    def __init__(self, inner: Tier, stream: Stream, seconds: float) -> None:
        self.inner = inner
        self.name = inner.name
        self._delayed: Stream = stream
        self._seconds = seconds
        self._changed = threading.Condition()
        self._order: list[_Late] = []
        """Transfers of both streams that have not begun, in the order of calls."""
        self._queues: dict[Stream, deque[_Late]] = {OFFLOAD: deque(), RELOAD: deque()}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"stowage-late-{each}", daemon=True)
            for each in (OFFLOAD, RELOAD)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def record(self) -> bool:
        """Implement `Tier.record`."""
        return self.inner.record

    @record.setter
    def record(self, value: bool) -> None:
        self.inner.record = value

    @property
    def memory_alignment(self) -> int:
        """Implement `Tier.memory_alignment`."""
        return self.inner.memory_alignment

    @property
    def staging_bytes(self) -> int:
        """Implement `Tier.staging_bytes`."""
        return self.inner.staging_bytes

    @property
    def spans(self) -> Sequence[Span]:
        """Implement `Tier.spans`."""
        return self.inner.spans

    def reserve(self, slots: Mapping[str, int], on_disk: Collection[str] = ()) -> None:
        """Implement `Tier.reserve`."""
        self.inner.reserve(slots, on_disk)

    def offload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Implement `Tier.offload`."""
        return self._put(OFFLOAD, name, tensor, self.inner.offload)

    def reload(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Implement `Tier.reload`."""
        check_movable(name, tensor, ("cpu", "cuda"))
        poison(tensor)
        return self._put(RELOAD, name, tensor, self.inner.reload)

    def content(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Implement `HostMemory.content`."""
        self._begun(name)
        return cast(HostMemory, self.inner).content(name, like)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Implement `HostMemory.keep`."""
        self._begun(name)
        cast(HostMemory, self.inner).keep(name, tensor)

    def _begun(self, name: str) -> None:
        """Return when every transfer of a slot has begun."""
        with self._changed:
            while any(late.name == name for late in self._order):
                self._changed.wait()

    def written(self, name: str) -> bool:
        """Implement `Tier.written`."""
        with self._changed:
            coming = any(late.name == name and late.stream == OFFLOAD for late in self._order)
        return coming or self.inner.written(name)

    def close(self) -> None:
        """Implement `Tier.close`; transfers that have not begun are begun first, without delay."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.inner.close()

    def _put(
        self, stream: Stream, name: str, tensor: torch.Tensor, verb: Callable[[str, torch.Tensor], Transfer]
    ) -> Transfer:
        surroundings = _as_here(tensor)

        def begin() -> Transfer:
            with surroundings:
                return verb(name, tensor)

        late = _Late(stream, name, begin)
        with self._changed:
            straight = stream != self._delayed and not self._queues[stream] and self._free(late)
            if not straight:
                self._order.append(late)
                self._queues[stream].append(late)
                self._changed.notify_all()
        if straight:
            return verb(name, tensor)
        return late

    def _free(self, late: _Late) -> bool:
        """Return whether no transfer of its slot is before this one. Call it with the lock taken."""
        for other in self._order:
            if other is late:
                return True
            if other.name == late.name:
                return False
        return True

    def _run(self, stream: Stream) -> None:
        queue = self._queues[stream]
        while True:
            with self._changed:
                while not (queue and self._free(queue[0])):
                    if self._closed and not queue:
                        return
                    self._changed.wait()
                late = queue[0]
            if stream == self._delayed and not self._closed:
                time.sleep(self._seconds)
            late.start()
            with self._changed:
                queue.popleft()
                self._order.remove(late)
                self._changed.notify_all()
            del late


def _as_here(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the caller's current stream current inside: each thread has its own, and a late start runs in another."""
    if tensor.device.type == "cuda":
        return torch.cuda.stream(torch.cuda.current_stream(tensor.device))
    return nullcontext()
