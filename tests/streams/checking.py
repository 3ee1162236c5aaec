"""Run steps on the model of a device and beside plain PyTorch; say what was found."""

from __future__ import annotations

import contextlib
import gc
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from stowage.stages.codegen import manifest_of
from stowage.stages.device.tiers import DiskTier, HostAndDiskTier, PinnedTier
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.plan import Slot
from stowage.stages.ir.trace import TraceTables
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.offload.offloading import Offloading
from tests.runtime.beside_eager import MakeOptimizer, differences, same
from tests.streams.clocks import Race
from tests.streams.device_mode import DeviceMode
from tests.streams.disk_turns import taking_turns
from tests.streams.machine import Machine, OtherSides, TurnLock
from tests.zoo import Entry, loss_of

SEED = 5


@dataclass(frozen=True)
class Piece:
    """A generated step, what it needs, and whether it updates."""

    trace: TraceTables
    source: str
    slots: Sequence[Slot]
    update: bool = True


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    Attributes:
        name: for people.
        build, optimizer: see the zoo.
        pieces: programs, one micro-batch after the other.
        max_grad_norm: of clipping.
        rounds: how often all pieces run.
    """

    name: str
    build: Callable[[], Entry]
    optimizer: MakeOptimizer
    pieces: tuple[Piece, ...]
    max_grad_norm: float | None = None
    rounds: int = 3


@dataclass
class Found:
    """What went wrong.

    Attributes:
        races: see `Shadow`.
        unwritten: reads of memory that nothing was written to.
        differing: numbers that are not those of plain PyTorch.
        unwaited: transfers that nobody waits for although their plan does not have them under way.
        error: the product's own, which ended the run early.
    """

    races: list[Race] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    unwaited: list[str] = field(default_factory=list)
    error: StowageError | None = None

    def all(self) -> list[str]:
        """One sentence each."""
        error = [f"{type(self.error).__name__}: {self.error}"] if self.error is not None else []
        return [*map(str, self.races), *self.unwritten, *self.differing, *self.unwaited, *error]

    @property
    def by_clocks(self) -> bool:
        """Whether it was found whatever the order: by clocks, an error, or what is left."""
        return bool(self.races or self.unwaited or self.error)


@dataclass(frozen=True)
class Truth:
    """Plain PyTorch's numbers."""

    model: nn.Module
    states: Any
    losses: list[torch.Tensor]
    norms: list[torch.Tensor | None]
    random_state: torch.Tensor


def truth_of(job: Job) -> Truth:
    """The same iterations without any plan."""
    return _truth(job.build, job.optimizer, tuple(piece.update for piece in job.pieces), job.max_grad_norm, job.rounds)


@cache
def _truth(
    build: Callable[[], Entry],
    make: MakeOptimizer,
    updates: tuple[bool, ...],
    max_grad_norm: float | None,
    rounds: int,
) -> Truth:
    model, batch, loss = build()
    optimizer = make(model)
    losses, norms = [], list[torch.Tensor | None]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        for _ in range(rounds):
            for update in updates:
                value = loss_of(model, batch, loss)
                torch.autograd.backward(value)
                losses.append(value.detach())
                norm = None
                if update:
                    if max_grad_norm is not None:
                        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                norms.append(norm)
        return Truth(model, optimizer.state_dict(), losses, norms, torch.get_rng_state())


def in_random_order(seed: int, *, values: bool = True) -> Machine:
    """Any legal order. The host is ahead of the device by as much as can be, or by less."""
    chance = random.Random(seed)
    pace = (0.0, 0.3, 0.7, 0.95)[seed % 4]
    return Machine(chance.choice, lambda: chance.random() < pace, values=values)


def preferring(order: Sequence[str], *, values: bool = True, go_on: Callable[[], bool] = lambda: False) -> Machine:
    """The first of these lanes that can go on does; those that are not named come after them."""

    def choose(ready: list[str]) -> str:
        return min(ready, key=lambda lane: next((i for i, o in enumerate(order) if lane.startswith(o)), len(order)))

    return Machine(choose, go_on, values=values)


ORDERS: dict[str, Callable[[], Machine]] = {
    "the host ahead": lambda: preferring(("compute",), values=False),
    "the host behind": lambda: preferring(("CPU updates", "compute"), values=False, go_on=lambda: True),
}
"""Two extremes, without numbers. What a thread waits for depends on what was asked for before its turn: so both."""


def tier_on(machine: Machine, folder: Path | None) -> PinnedTier | HostAndDiskTier:
    """Make the lower tier of a machine, with a disk behind the host if a folder is given."""
    host = PinnedTier(lanes=machine)
    if folder is None:
        return host
    lanes: Any = OtherSides(machine)
    disk = DiskTier(folder, chunk_bytes=4096, threads=1, lanes=lanes)
    disk._issue = TurnLock(machine)  # type: ignore[assignment]
    return HostAndDiskTier(host, disk)


class Run:
    """One job on one machine.

    Attributes:
        programs: of the job's pieces.
        tier: the lower tier.
        settled: what an iteration found under way that its plan does not have under way, and waited for.
    """

    def __init__(self, job: Job, machine: Machine, folder: Path | None = None) -> None:
        self.job, self.machine = job, machine
        self.model, self.batch, _ = job.build()
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            tensor.data = machine.to_device(tensor, name)
        self.batch = tree_map_only(torch.Tensor, lambda t: machine.to_device(t, "input"), self.batch)
        self.optimizer = job.optimizer(self.model)
        self.tier = tier_on(machine, folder)
        self.offloading = Offloading(self.tier, self.model, self.optimizer)
        self.settled: set[str] = set()
        self._settles = False
        self._watch_settling()
        self.programs = [self._program(piece, i) for i, piece in enumerate(job.pieces)]

    def _watch_settling(self) -> None:
        offloading = self.offloading
        settle = offloading.settle

        def watched(name: str) -> None:
            parameter = name.partition("::")[0]
            under_way = [n for n in (parameter, name) if offloading.where(n) not in ("device", "offloaded")]
            if self._settles:
                self.settled.update(under_way)
            settle(name)

        offloading.settle = watched  # type: ignore[method-assign]

    def _program(self, piece: Piece, number: int) -> Program:
        known = manifest_of(piece.source, "by hand", "").source_hash
        file = f"streams_{number}_{known[:8]}.py"
        program = bind(piece.source, known, file, piece.trace, self.model, self.optimizer, piece.slots, self.offloading)
        held = {n: self.machine.to_device(t, f"constant {n}") for n, t in program._constants.items()}
        program.replace_constants(held)
        return program

    def train(self) -> Found:
        """All iterations, then the comparison."""
        found, losses, norms = Found(), list[torch.Tensor](), list[torch.Tensor | None]()
        machine = self.machine
        with torch.random.fork_rng(devices=[]), DeviceMode(machine):
            torch.manual_seed(SEED)
            try:
                for number in range(self.job.rounds):
                    self._settles = number > 0
                    for program, piece in zip(self.programs, self.job.pieces):
                        machine.iteration += 1
                        machine.step_file = inspect.unwrap(program._step).__code__.co_filename
                        machine.step_lines = piece.source.splitlines()
                        losses.append(program(self.batch))
                        norms.append(program.grad_norm)
                        found.unwaited += self._unwaited(piece)
                self._settles = False
                machine.step_file = ""
                self.offloading.fetch_all()
                machine.drain()
            except StowageError as error:
                error.__traceback__ = None
                found.error = error
            state = torch.get_rng_state()
        found.races, found.unwritten = machine.shadow.races, machine.unwritten
        if found.error is None and machine.values:
            found.differing = self._compare(losses, norms, state)
        return found

    def _unwaited(self, piece: Piece) -> list[str]:
        """Transfers that are held by nobody but the tier, or under way where the plan has nothing under way."""
        host = self.tier.host if isinstance(self.tier, HostAndDiskTier) else self.tier
        known = {id(transfer) for transfer in self.offloading.transfers().values()}
        lost = [f"the copy of '{t.name}' is never waited for" for t in host._unwaited if id(t) not in known]
        planned = {s.name for s in piece.slots if s.start in ("offloading", "reloading")}
        late = [n for n in self.offloading.transfers() if n not in planned]
        return sorted(lost) + [f"the copy of '{n}' is never waited for" for n in late]

    def _compare(self, losses: list[torch.Tensor], norms: list[torch.Tensor | None], state: torch.Tensor) -> list[str]:
        truth = truth_of(self.job)
        found = [f"loss {i}" for i, (one, two) in enumerate(zip(losses, truth.losses)) if not same(one, two)]
        found += [f"norm {i}" for i, (one, two) in enumerate(zip(norms, truth.norms)) if not same(one, two)]
        found += differences(self.model, truth.model)
        if not same(self.optimizer.state_dict(), truth.states):
            found.append("states of the optimizer")
        if not torch.equal(state, truth.random_state):
            found.append("the generator")
        return found

    def close(self) -> None:
        """Give back what it made."""
        self.tier.close()
        self.machine.close()


@contextlib.contextmanager
def running(job: Job, machine: Machine, folder: Path | None = None) -> Iterator[Run]:
    """A job on a machine; the garbage collector does not choose when memory is freed."""
    gc.disable()
    try:
        with taking_turns(machine):
            run = Run(job, machine, folder)
            try:
                yield run
            finally:
                run.close()
    finally:
        gc.enable()


def check(job: Job, machine: Machine, folder: Path | None = None) -> Found:
    """What one run finds."""
    with running(job, machine, folder) as run:
        return run.train()
