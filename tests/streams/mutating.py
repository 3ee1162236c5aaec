"""Steps with one thing wrong: a wait that is missing or late, a release that is early, an order that is ignored."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from stowage.stages.ir.plan import Slot
from stowage.stages.runtime.iteration import Iteration
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


_STARTS = {"offload": "down", "reload": "up", "update_below": "update"}


def _lane(source: str, slots: Sequence[Slot], wait: Line) -> tuple[str, int]:
    """What a wait waits for: a lane, and the place in it, counted in lines; what began an iteration ago is early."""
    slot = next(s for s in slots if s.name == wait.slot)
    begun = [b for b in lines_of(source, r"run\.(offload|reload|update_below)\(") if b.slot == wait.slot]
    before = [b for b in begun if b.number < wait.number]
    latest = before[-1] if before else begun[-1]
    kind = _STARTS[latest.text.partition("run.")[2].partition("(")[0]]
    lane = kind if kind == "update" else f"{slot.home} {kind}"
    return lane, latest.number if before else latest.number - len(source.splitlines())


def covered(source: str, slots: Sequence[Slot], wait: Line) -> bool:
    """Whether a wait right after this one is for something later in the same lane: then it has no effect of its own."""
    lane, place = _lane(source, slots, wait)
    text = source.splitlines()
    for number in range(wait.number + 1, len(text) + 1):
        line = text[number - 1].strip()
        if line and not line.startswith(("run.begin", "run.wait(")) and " = run.wait(" not in line:
            return False
        if "run.wait(" in line:
            other = next(w for w in waits(source) if w.number == number)
            found, later = _lane(source, slots, other)
            if found == lane and later > place:
                return True
    return False


def with_source(job: Job, source: str, piece: int = 0) -> Job:
    """The same job with another text of one of its steps."""
    pieces: list[Piece] = list(job.pieces)
    pieces[piece] = replace(pieces[piece], source=source)
    return replace(job, pieces=tuple(pieces))


@contextmanager
def hurried(machine: Machine, number: int, piece: int = 0) -> Iterator[None]:
    """The wait in one line does everything but wait."""
    wait = Iteration.wait

    def hurry(self: Iteration, name: str) -> torch.Tensor | None:
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
        patch.setattr(Iteration, "wait", hurry)
        yield
