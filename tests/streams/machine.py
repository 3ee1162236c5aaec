"""A GPU's streams, its memory, and the threads beside it, in any legal order, with a clock for each of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from stowage.stages.device.tiers.base import Stream
from tests.device.tiers.model_lanes import Event, ModelLanes
from tests.streams.arena import Arena, Block
from tests.streams.clocks import Access, Clock, Shadow, join
from tests.streams.turns import Agent

HOST = "host"
PAGE = 4096


@dataclass(frozen=True)
class Touch:
    """Memory that work reads or writes.

    Attributes:
        key: a block of the device, or a place of the host or the disk.
        memory: its name at the time of the call.
        kind: see `Access`.
    """

    key: Hashable
    memory: str
    kind: str


@dataclass(frozen=True)
class Work:
    """What is queued on a stream."""

    run: Callable[[], object]
    touches: Sequence[Touch]
    label: str
    clock: Clock


@dataclass(frozen=True)
class Mark:
    """Memory is taken from or given to the allocator, in the order of the compute stream."""

    touch: Touch
    label: str
    clock: Clock


@dataclass(frozen=True)
class Wait:
    """A stream waits for an event."""

    event: Event
    clock: Clock
    line: int


@dataclass(frozen=True)
class Record:
    """An event is reached."""

    event: Event
    clock: Clock


class Machine(ModelLanes):
    """See `DeviceLanes`. Each piece of work joins the clocks of what it comes after, and says what it touches.

    Attributes:
        shadow: what was touched, and races.
        arena: the device's memory.
        values: whether kernels are run at all; without, only orders are looked at.
        ignored: as in `ModelLanes`; also (who waits, stream) for waits of the host and of threads for a stream, and
            (who waits, thread) for those for a thread.
        needed: (file, line) of the step where something waited for what it did not know to be done.
        held: bytes on the device when memory was taken, at most, by (file, line) of the step.
        unwritten: reads of device memory that nothing was written to.
        step_file, step_lines: the generated step, for labels.
        iteration: for labels.
    """

    def __init__(
        self,
        choose: Callable[[list[str]], str],
        go_on: Callable[[], bool] = lambda: False,
        *,
        values: bool = True,
    ) -> None:
        """`choose`: among lanes that can go on; `go_on`: whether one does before the host's next call returns."""
        super().__init__(choose)
        self.queues |= {"disk offload": deque(), "disk reload": deque()}
        self.shadow = Shadow()
        self.arena = Arena(self._taken, self._freed)
        self.values = values
        self.unwritten: list[str] = []
        self.held: dict[tuple[str, int], int] = {}
        self.needed: set[tuple[str, int]] = set()
        self.step_file = ""
        self.step_lines: list[str] = []
        self.iteration = 0
        self.agents: dict[str, Agent] = {}
        self.current: Agent | None = None
        self._go_on = go_on
        self._clocks: dict[str, Clock] = {}
        self._clock_of: dict[Event, Clock] = {}
        self._pinned: list[tuple[int, int, np.ndarray[Any, Any]]] = []
        self._names: dict[Hashable, str] = {}
        self._at_work = False
        self._closed = False

    # Who asks, and for what.

    @property
    def actor(self) -> str:
        """Who calls: the host, or one of the threads."""
        return self.current.name if self.current is not None else HOST

    def clock(self, lane: str) -> Clock:
        """What a lane knows to be done."""
        return self._clocks.setdefault(lane, {})

    def now(self) -> Clock:
        """What the caller knows to be done."""
        return dict(self.clock(self.actor))

    def learn(self, clock: Clock) -> None:
        """The caller knows that all of this is done."""
        self._learn(self.clock(self.actor), clock, self.line())

    def _learn(self, clock: Clock, other: Clock, line: int) -> None:
        if line and any(clock.get(lane, 0) < time for lane, time in other.items()):
            self.needed.add((self.step_file, line))
        join(clock, other)

    def line(self) -> int:
        """The line of the step that is running; 0 outside of it."""
        frame = sys._getframe(1)
        for _ in range(40):
            if frame.f_code.co_filename == self.step_file:
                return frame.f_lineno
            if frame.f_back is None or self.current is not None:
                break
            frame = frame.f_back
        return 0

    def where(self) -> str:
        """The line of the step that is running, or what the thread is at work on."""
        if self.current is not None:
            return self.current.label
        line = self.line()
        if not line:
            return f"iteration {self.iteration}, outside of the step"
        text = self.step_lines[line - 1].partition("  # ")[0].strip()
        return f"iteration {self.iteration}, line {line}: {text[:90]}"

    # Streams and events.

    def record(self, stream: str) -> Event:
        """See `DeviceLanes`."""
        event = Event()
        self._source[event] = stream
        self._queue(stream, Record(event, self.now()))
        return event

    def wait(self, stream: str, event: Event) -> None:
        """See `DeviceLanes`."""
        if (stream, self._source[event]) not in self.ignored:
            self._queue(stream, Wait(event, self.now(), self.line()))

    def copy(self, stream: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `DeviceLanes`."""
        to, of = self.untracked(destination), self.untracked(source)
        touches = [*self.touches([source], "reads"), *self.touches([destination], "writes")]
        self.work(stream, lambda: to.copy_(of), touches, f"copy, {self.where()}")

    def work(self, stream: str, run: Callable[[], object], touches: Sequence[Touch], label: str) -> None:
        """Queue any work."""
        self._queue(stream, Work(run, touches, label, self.now()))

    def run(self, work: Callable[[], object]) -> None:
        """A kernel on the compute stream that touches nothing of interest."""
        self.work("compute", work, (), self.where())

    def done(self, event: Event) -> bool:
        """See `DeviceLanes`. Who sees that it is complete knows what was before it."""
        if event.complete:
            self.learn(self._reached(event))
        return event.complete

    def finish(self, event: Event) -> None:
        """See `DeviceLanes`."""
        if (self.actor, self._source[event]) not in self.ignored:
            self.until(lambda: event.complete)
            self.learn(self._reached(event))

    def synchronize(self) -> None:
        """See `DeviceLanes`."""
        self.drain()

    def finish_stream(self, stream: str) -> None:
        """The caller waits until a stream is idle."""
        self.finish(self.record(stream))

    def until(self, holds: Callable[[], object]) -> None:
        """The caller waits; others go on meanwhile."""
        if self.current is not None:
            if not holds():
                self.current.until(holds)
            return
        with _disable_current_modes():
            while not holds():
                self._one()

    def drain(self) -> None:
        """Do all work."""
        with _disable_current_modes():
            while any(self.queues.values()) or any(agent.ready() for agent in self.agents.values()):
                self._one()
        for clock in list(self._clocks.values()):
            join(self.clock(HOST), clock)

    def _queue(self, stream: str, item: Any) -> None:
        self.queues[stream].append(item)
        if self.current is None and not self._at_work and not self._closed and self._go_on():
            with _disable_current_modes():
                while self._some() and self._go_on():
                    pass

    def _some(self) -> bool:
        """One piece of work, if there is any."""
        if any(self.queues.values()):
            self._one()
            return True
        return False

    def _one(self) -> None:
        ready = [name for name, q in self.queues.items() if q and (not isinstance(q[0], Wait) or q[0].event.complete)]
        ready += [name for name, agent in self.agents.items() if agent.ready()]
        assert ready, f"streams wait for each other: {[(n, q[0]) for n, q in self.queues.items() if q]}"
        chosen = self._choose(ready)
        self._at_work = True
        try:
            if chosen in self.agents:
                self.resume(self.agents[chosen])
            else:
                self._do(chosen, self.queues[chosen].popleft())
        finally:
            self._at_work = False

    def resume(self, agent: Agent) -> None:
        """It is a thread's turn."""
        self.current = agent
        try:
            agent.resume()
        finally:
            self.current = None

    def _do(self, stream: str, item: Any) -> None:
        clock = self.clock(stream)
        match item:
            case Wait(event, earlier, line):
                join(clock, earlier)
                self._learn(clock, self._reached(event), line)
            case Record(event, earlier):
                join(clock, earlier)
                self._clock_of[event] = dict(clock)
                self._reach(event)
            case Work(run, touches, label, earlier):
                join(clock, earlier)
                self._note(stream, touches, label, clock)
                run()
            case Mark(touch, label, earlier):
                seen = dict(clock)
                join(seen, earlier)
                self._note(stream, [touch], label, clock, seen)

    def _reached(self, event: Event) -> Clock:
        return self._clock_of.get(event, {})

    # Memory.

    def touch(self, touches: Sequence[Touch], label: str) -> None:
        """The caller itself reads and writes memory, now."""
        self._note(self.actor, touches, label, self.clock(self.actor))

    def _note(self, lane: str, touches: Sequence[Touch], label: str, clock: Clock, seen: Clock | None = None) -> None:
        clock[lane] = clock.get(lane, 0) + 1
        known = clock if seen is None else seen
        for touch in touches:
            access = Access(lane, clock[lane], label, touch.kind)
            block = touch.key if isinstance(touch.key, Block) else None
            if touch.kind == "reads":
                if block is not None and not block.written:
                    self.unwritten.append(f"'{touch.memory}' is read before anything was written there: {label}")
                self.shadow.read(touch.key, touch.memory, access, known)
            else:
                self.shadow.write(touch.key, touch.memory, access, known)
                if block is not None:
                    block.written = touch.kind == "writes" or (touch.kind == "frees" and block.written)

    def touches(self, tensors: Iterable[torch.Tensor], kind: str) -> list[Touch]:
        """Of tensors on the device or in memory that the device reaches."""
        found = []
        for tensor in tensors:
            block = self.arena.block_of(tensor)
            if block is not None:
                found.append(Touch(block, block.owner, kind))
            elif tensor.numel() and self.is_pinned(address := tensor.data_ptr()):
                found.append(self.in_host(address, kind))
        return found

    def is_pinned(self, address: int) -> bool:
        """Whether the device reaches that memory of the host."""
        return any(start <= address < end for start, end, _ in self._pinned)

    def in_host(self, address: int, kind: str) -> Touch:
        """Memory of a slot or a buffer, by its start."""
        return Touch(address, self._names.get(address, f"host memory {address:#x}"), kind)

    def name_host(self, address: int, name: str) -> None:
        """What people call it."""
        self._names[address] = name

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `DeviceLanes`."""
        with _disable_current_modes():
            memory = np.zeros(nbytes + PAGE, dtype=np.uint8)
            start = -memory.ctypes.data % PAGE
            part = memory[start : start + nbytes]
            self._pinned.append((part.ctypes.data, part.ctypes.data + nbytes, memory))
            return torch.from_numpy(part)

    def untracked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without holding it: queued work holds no memory of the device."""
        block = self.arena.block_of(tensor)
        with _disable_current_modes():
            if block is None:
                return tensor.detach()
            return block.view(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset())

    def to_device(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A copy on the device that was there before everything else."""
        with _disable_current_modes(), torch.no_grad():
            made = self.arena.empty(tuple(tensor.shape), tensor.stride(), tensor.dtype)
            made.copy_(tensor.detach())
        block = self.arena.block_of(made)
        if block is not None:
            block.owner = name
            self.drain()
            block.written = True
        return made

    def _taken(self, block: Block) -> None:
        block.owner = f"memory of {self.where()}"
        place = (self.step_file, self.line())
        self.held[place] = max(self.held.get(place, 0), self.arena.held)
        self._mark(block, "takes")

    def _freed(self, block: Block) -> None:
        self._mark(block, "frees")

    def _mark(self, block: Block, kind: str) -> None:
        if not self._closed:
            touch = Touch(block, block.owner, kind)
            self._queue("compute", Mark(touch, f"by the allocator, {self.where()}", self.now()))

    # Threads.

    def agent(self, name: str, body: Callable[[Agent], None]) -> Agent:
        """A thread that takes turns."""
        self.agents[name] = Agent(name, body)
        return self.agents[name]

    def close(self) -> None:
        """End all threads. Memory that is freed later is of no interest."""
        self._closed = True
        for agent in self.agents.values():
            self.current = agent
            agent.end()
        self.current = None


class TurnLock:
    """A lock of the tier's: who cannot have it lets others go on."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._taken = False

    def __enter__(self) -> None:
        self._machine.until(lambda: not self._taken)
        self._taken = True

    def __exit__(self, *error: object) -> None:
        self._taken = False


class OtherSides:
    """The lanes of a disk tier: the same compute stream and memory, side streams of its own."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def side(self, stream: Stream) -> str:
        """See `DeviceLanes`."""
        return f"disk {stream}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)
