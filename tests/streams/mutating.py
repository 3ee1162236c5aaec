"""Steps with one thing wrong: a wait that is missing or late, a release that is early, an order that is ignored."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from stowage.stages.device.tiers import OFFLOAD, PinnedTier
from stowage.stages.device.tiers.base import Stream
from stowage.stages.ir.plan import Slot
from stowage.stages.ir.updates import is_gradient_slot
from stowage.stages.runtime.executors.iteration import SingleIteration
from stowage.stages.runtime.offload.offloading import Offloading
from tests.streams.checking import Job, Piece
from tests.streams.disk_turns import UPDATES
from tests.streams.machine import HOST, Machine

WAITS = frozenset({
    ("compute", "offload"), ("compute", "reload"), (HOST, "disk offload thread"), (HOST, "disk reload thread"),
    (HOST, UPDATES),
})  # fmt: skip
"""What a wait of the step waits for."""


@dataclass(frozen=True)
class Line:
    """One line of a step's text.

    Attributes:
        number: from 1.
        text: without indentation and comment.
    """

    number: int
    text: str

    @property
    def slot(self) -> str:
        """The name in its quotes."""
        found = re.search(r'run\.\w+\("([^"]*)"', self.text)
        return found[1] if found else ""


def lines_of(source: str, pattern: str) -> list[Line]:
    """Lines that match."""
    found = [Line(i, line.partition("  # ")[0].strip()) for i, line in enumerate(source.splitlines(), 1)]
    return [line for line in found if re.search(pattern, line.text)]


def waits(source: str) -> list[Line]:
    """All waits."""
    return lines_of(source, r"run\.wait\(")


def without(source: str, line: Line) -> str:
    """A line is not there."""
    rest = source.splitlines()
    del rest[line.number - 1]
    return "\n".join(rest) + "\n"


def moved(source: str, line: Line, before: int) -> str:
    """A line stands before another line, given by its number."""
    rest = source.splitlines()
    rest[line.number - 1 : line.number], text = [], rest[line.number - 1]
    rest.insert(before - 1 if before <= line.number else before - 2, text)
    return "\n".join(rest) + "\n"


_STARTS = {"offload": "down", "reload": "up", "update_on_cpu": "update"}


def _lane(source: str, slots: Sequence[Slot], wait: Line) -> tuple[str, int]:
    """What a wait waits for: a lane, and the place in it, counted in lines; what began an iteration ago is early."""
    slot = next(s for s in slots if s.name == wait.slot)
    begun = [b for b in lines_of(source, r"run\.(offload|reload|update_on_cpu)\(") if b.slot == wait.slot]
    before = [b for b in begun if b.number < wait.number]
    latest = before[-1] if before else begun[-1]
    kind = _STARTS[latest.text.partition("run.")[2].partition("(")[0]]
    lane = kind if kind == "update" else f"{slot.placement} {kind}"
    return lane, latest.number if before else latest.number - len(source.splitlines())


def covered(source: str, slots: Sequence[Slot], wait: Line) -> bool:
    """Whether another wait is for something later in the same lane, and comes before anything could go wrong.

    Then this one has no effect of its own. The first iteration has no states yet: waits for them do nothing there.
    """
    lane, place = _lane(source, slots, wait)
    needs = {r.number for r in readers(source, wait)}
    for line in lines_of(source, "."):
        if line.number <= place or line.number == wait.number:
            continue
        if "run.wait(" in line.text and line.slot != wait.slot:
            found, later = _lane(source, slots, line)
            sure = not _is_state(line.slot) or _is_state(wait.slot)
            if found == lane and later > place and sure:
                return True
        elif (
            line.number > wait.number
            and line.number in needs
            and (not lane.endswith("down") or _changes(line.text, wait.slot))
        ):
            return False
    return False


def _is_state(slot: str) -> bool:
    return "::" in slot and not is_gradient_slot(slot)


def comes_by_itself(source: str, slots: Sequence[Slot], wait: Line) -> bool:
    """Whether it waits for a gradient on its way up, which `run.gradient` brings and waits for wherever it is."""
    return is_gradient_slot(wait.slot) and _lane(source, slots, wait)[0].endswith("up")


def _changes(text: str, slot: str) -> bool:
    """Whether a line that names it changes or drops what is on the device, or what is offloaded."""
    if text.startswith(("run.update_on_cpu(", "run.wait(")):
        return False
    calls = r"^(del |run\.)|\w_\(|_\.\w+\("
    return re.search(calls, text) is not None and not (text.startswith("run.update(") and f'"{slot}"' not in text)


def readers(source: str, line: Line) -> list[Line]:
    """Lines after it that need what is in its slot: they name it, or what was fetched from it."""
    slot = re.escape(line.slot)
    parameter = re.escape(line.slot.partition("::")[0])
    fetches = rf'^(\w+) = run\.(parameter|gradient)\["{parameter}"\]'
    names = [found[1] for text in source.splitlines() if (found := re.match(fetches, text.strip()))]
    words = "|".join([*map(re.escape, names), slot] if "::" not in line.slot else ['"' + parameter + '"'])
    found = lines_of(source, rf'"{slot}"|(?<![\w."])({words})(?!\w)')
    dropped = [r for r in found if r.number > line.number and not re.match(fetches, r.text)]
    if names or "::" in line.slot:  # the names go, what is in memory stays
        dropped = [r for r in dropped if not r.text.startswith("del ")]
    return dropped


def with_source(job: Job, source: str, piece: int = 0) -> Job:
    """The same job with another text of one of its steps."""
    pieces: list[Piece] = list(job.pieces)
    pieces[piece] = replace(pieces[piece], source=source)
    return replace(job, pieces=tuple(pieces))


@contextmanager
def holding_nothing() -> Iterator[None]:
    """Nobody holds what is offloaded: neither the tier's transfer nor who asked for it."""
    start, offload = PinnedTier._start, Offloading.offload

    def forgetful(self: PinnedTier, stream: Stream, *arguments: Any) -> Any:
        transfer = start(self, stream, *arguments)
        if stream == OFFLOAD:
            transfer._tensors = ()
        return transfer

    def careless(self: Offloading, name: str, activation: torch.Tensor | None = None) -> None:
        offload(self, name, activation)
        if name in self._under_way:
            self._under_way[name] = replace(self._under_way[name], tensor=torch.empty(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PinnedTier, "_start", forgetful)
        patch.setattr(Offloading, "offload", careless)
        yield


@contextmanager
def hurried(machine: Machine, number: int, piece: int = 0) -> Iterator[None]:
    """The wait in one line does everything but wait."""
    wait = SingleIteration.wait

    def hurry(self: SingleIteration, name: str) -> torch.Tensor | None:
        caller = sys._getframe(1)
        here = caller.f_lineno == number and caller.f_code.co_filename.startswith(f"streams_{piece}_")
        before = set(machine.ignored)
        if here:
            machine.ignored |= WAITS
        try:
            return wait(self, name)
        finally:
            machine.ignored = before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SingleIteration, "wait", hurry)
        yield
