"""A disk tier's threads, and the thread of updates by the CPU, as lanes of the model: they take turns."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from stowage.stages.device.tiers import disk
from stowage.stages.device.tiers.base import Stream
from stowage.stages.device.tiers.disk_mover import Mover
from stowage.stages.device.tiers.lanes import LaneJob, Lanes, Staging, _Lane
from stowage.stages.runtime.offload import cpu_updates as lower_tier
from tests.streams.clocks import Clock, join
from tests.streams.device_mode import HostMode
from tests.streams.machine import Machine, Touch
from tests.streams.turns import Agent

UPDATES = "CPU updates"


class _Job(LaneJob):
    """Whose wait lets others go on."""

    machine: Machine

    def __init__(self, stream: Stream, name: str, tensor: Any, slot: int, chunks: int) -> None:
        super().__init__(stream, name, tensor, slot, chunks)
        self.label = self.machine.where()
        self.asked: Clock = self.machine.now()
        self.did: Clock = {}
        """What was done when it was complete."""

    def wait(self) -> None:
        """See `Transfer`."""
        if (self.machine.actor, f"disk {self.stream} thread") not in self.machine.ignored:
            self.machine.until(self._complete.is_set)
            self.machine.learn(self.did)
            super().wait()

    def done(self) -> bool:
        """See `Transfer`."""
        if self._complete.is_set():
            self.machine.learn(self.did)
        return self._complete.is_set()


class _Mover(Mover):
    """Notes what of the file and of staging buffers it touches."""

    machine: Machine

    def __call__(self, job: LaneJob, chunk: int, staging: Staging) -> None:
        assert isinstance(job, _Job)
        agent = self.machine.current
        assert agent is not None
        agent.label = f"{job.stream} of '{job.name}' for {job.label}"
        self._jobs[agent.name] = job
        super().__call__(job, chunk, staging)

    @property
    def _jobs(self) -> dict[str, _Job]:
        found: dict[str, _Job] = self.__dict__.setdefault("_at", {})
        return found

    def _write(self, buffer: memoryview, position: int) -> None:
        self._touch(buffer, "reads", "writes")
        super()._write(buffer, position)

    def _read(self, buffer: memoryview, position: int) -> None:
        self._touch(buffer, "writes", "reads")
        super()._read(buffer, position)

    def _touch(self, buffer: memoryview, in_memory: str, in_file: str) -> None:
        machine = self.machine
        job = self._jobs[machine.actor]
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        touches = [Touch(("file", id(type(self)), job.slot), f"{job.name} in the file", in_file)]
        if machine.is_pinned(address):
            touches.append(machine.in_host(address, in_memory))
        machine.touch(touches, machine.where())

    def _forget(self, stream: Stream, position: int, length: int) -> None:
        """The page cache is of no interest here."""


class _Lanes(Lanes):
    """The same jobs, by threads that take turns."""

    machine: Machine

    def __init__(
        self,
        streams: tuple[Stream, ...],
        threads: int,
        staging_bytes: int,
        move: Callable[[LaneJob, int, Staging], None],
        failed: Callable[[LaneJob, Exception], Exception],
        stagings: Sequence[Staging] | None = None,
    ) -> None:
        self.record = False
        self.spans = []
        self._move, self._failed = move, failed
        self._lock = threading.Lock()
        self._lanes = {stream: _Lane(self._lock) for stream in streams}
        self._stopped = False
        self._threads = []
        made = list(stagings or [Staging.new(staging_bytes) for _ in range(threads * len(streams))])
        for stream, lane in self._lanes.items():
            for number in range(threads):
                self.machine.agent(f"disk {stream} thread {number}", self._body(lane, made.pop(0)))

    def submit(self, job: LaneJob) -> None:
        """See `Lanes`."""
        super().submit(job)
        assert isinstance(job, _Job)
        join(job.asked, self.machine.now())

    def _body(self, lane: _Lane, staging: Staging) -> Callable[[Agent], None]:
        def body(agent: Agent) -> None:
            while True:
                agent.until(lambda: self._may(lane))
                if self._stopped:
                    return
                self._turn(lane, staging)

        return body

    def _may(self, lane: _Lane) -> bool:
        if self._stopped:
            return True
        if not lane.unclaimed:
            return False
        job = lane.unclaimed[0]
        return job.claimed > 0 or all(other._complete.is_set() for other in job.after)

    def _turn(self, lane: _Lane, staging: Staging) -> None:
        job = lane.unclaimed[0]
        assert isinstance(job, _Job)
        self.machine.learn(job.asked)
        for other in job.after if job.claimed == 0 else ():
            assert isinstance(other, _Job)
            self.machine.learn(other.did)
            join(job.asked, other.did)
        claim = self._claim(lane)
        assert claim is not None
        error: Exception | None = None
        if job.error is None:
            try:
                self._move(job, claim[1], staging)
            except Exception as problem:
                error = problem
        join(job.did, self.machine.now())
        self._account(lane, job, error)

    def stop(self) -> None:
        """See `Lanes`."""
        self.machine.drain()
        self._stopped = True


class _Future(Future[Any]):
    """Whose result is waited for while others go on."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self.did: Clock = {}

    def result(self, timeout: float | None = None) -> Any:
        """See `Future`. Where the wait is ignored the update happens to be done in time, and nobody knows that it is.

        Not to have its result would show nothing: what is read too early is whole, and the update waits for who reads.
        """
        self._machine.until(self.done)
        if (self._machine.actor, UPDATES) not in self._machine.ignored:
            self._machine.learn(self.did)
        return super().result(timeout)


class _Executor:
    """One thread that takes turns with the others."""

    machine: Machine

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        assert max_workers == 1, "the model has one thread for updates"
        self._tasks: deque[tuple[_Future, Callable[..., Any], tuple[Any, ...], Clock, str]] = deque()
        self.machine.agent(UPDATES, self._body)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> _Future:
        """See `Executor`."""
        future = _Future(self.machine)
        self._tasks.append((future, call, arguments, self.machine.now(), self.machine.where()))
        return future

    def _body(self, agent: Agent) -> None:
        while True:
            agent.until(lambda: self._tasks)
            future, call, arguments, asked, agent.label = self._tasks.popleft()
            self.machine.learn(asked)
            try:
                with HostMode(self.machine):
                    result = call(*arguments)
            except Exception as error:
                future.did = self.machine.now()
                future.set_exception(error)
            else:
                future.did = self.machine.now()
                future.set_result(result)
            del call, arguments


@contextmanager
def taking_turns(machine: Machine) -> Iterator[None]:
    """Threads that are made meanwhile are lanes of the model."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, kind in (
            (disk, "LaneJob", _Job),
            (disk, "Mover", _Mover),
            (disk, "Lanes", _Lanes),
            (lower_tier, "ThreadPoolExecutor", _Executor),
        ):
            patch.setattr(module, name, type(name, (kind,), {"machine": machine}))
        yield
