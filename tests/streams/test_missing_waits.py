"""Every wait of a generated step, taken out or made late: what the model of streams says without it.

The numbers are not looked at: clocks, errors, and memory that is held longer tell in every order alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from stowage.stages.ir.errors import StowageError
from tests.matrix import some
from tests.streams.checking import ORDERS, Job, check, preferring, running
from tests.streams.hand_plans import Way
from tests.streams.jobs import disk_for, hand_job, summed_job
from tests.streams.machine import Machine
from tests.streams.mutating import (
    Line,
    comes_by_itself,
    covered,
    holding_nothing,
    hurried,
    lines_of,
    moved,
    readers,
    waits,
    with_source,
    without,
)

AHEAD = "the host ahead"

JOBS = {
    "everything": lambda: hand_job("batchnorm", "adamw", "everything"),
    "by the CPU": lambda: hand_job("batchnorm", "adamw", "by the CPU"),
    "around": lambda: hand_job("batchnorm", "adamw", "around"),
    "disk, by the CPU, around": lambda: hand_job("batchnorm", "adamw", "disk, by the CPU, around"),
    "clipped": lambda: hand_job("batchnorm", "momentum", "by the CPU, around", 0.1),
    "summed": lambda: summed_job("batchnorm", "momentum", Way(gradients=True)),
    "gpt2": lambda: hand_job("gpt2", "adamw", "disk, by the CPU, around"),
    "llama": lambda: hand_job("llama", "momentum", "everything"),
}


Held = dict[tuple[str, int], int]
"""Bytes on the device when memory was taken, by file and line."""


def as_it_is(job: Job, folder: Path) -> Held:
    """What a job holds where the host is ahead; nothing is found in it."""
    for order in ORDERS.values():
        machine = order()
        with running(job, machine, disk_for(job, folder)) as run:
            assert run.train().all() == []
            assert run.settled == set(), "an iteration ends as it begins"
    return ahead_held(job, folder)


def ahead_held(job: Job, folder: Path) -> Held:
    machine = ORDERS[AHEAD]()
    check(job, machine, disk_for(job, folder))
    return dict(machine.held)


def hurry(job: Job, line: Line, piece: int, held: Held, folder: Path) -> str:
    """What is found if a line does everything but wait; empty if nothing is."""
    for name, order in ORDERS.items():
        machine = order()
        with hurried(machine, line.number, piece):
            found = check(job, machine, disk_for(job, folder))
        longer = [p for p, nbytes in machine.held.items() if name == AHEAD and nbytes > held.get(p, 0)]
        if found.all() or longer:
            return "; ".join([*found.all(), *(f"memory is held longer at {place}" for place in longer)])
    return ""


def changed(job: Job, source: str, piece: int, folder: Path) -> tuple[list[str], set[str]]:
    """What is found with another text, and what the next iteration waited for as it entered."""
    settled: set[str] = set()
    for order in (*ORDERS.values(), with_numbers):
        try:
            with running(with_source(job, source, piece), order(), disk_for(job, folder)) as run:
                found = run.train().all()
        except StowageError as refused:
            return [str(refused)], set()
        if found:
            return found, run.settled
        settled |= run.settled
    return [], settled


def with_numbers() -> Machine:
    """The host ahead: an update that comes too late leaves an old weight in a file, which is no race."""
    return preferring(("compute",))


def lines_to_try(job: Job, kept: int) -> Iterable[tuple[int, Line]]:
    """Waits of all pieces, about so many of them, spread evenly."""
    found = [(number, line) for number, piece in enumerate(job.pieces) for line in waits(piece.source)]
    return found[:: max(1, len(found) // kept)]


def some_jobs(kept: Iterable[str]) -> list[object]:
    """A few lines of a few jobs; all lines of all jobs where all is tried."""
    few = [(name, 4) for name in kept]
    return some([*few, *((name, 1 << 20) for name in JOBS)], keep=few)


def on_disk(job: Job, piece: int, line: Line) -> bool:
    """Whether what it waits for lives on the disk."""
    return any(s.placement == "disk" for s in job.pieces[piece].slots if s.name == line.slot)


def is_of_an_update(source: str, line: Line) -> bool:
    """Whether it waits for an update by the CPU."""
    return bool(lines_of(source, rf'run\.update_on_cpu\("{re.escape(line.slot)}"'))


@pytest.mark.parametrize(("name", "kept"), some_jobs(["everything", "disk, by the CPU, around", "clipped"]))
def test_a_wait_that_does_not_wait(name: str, kept: int, tmp_path: Path) -> None:
    """Each is found, but those that have no effect since the next one is for something later in the same lane."""
    job = JOBS[name]()
    held = as_it_is(job, tmp_path)
    wrong = []
    for piece, line in lines_to_try(job, kept):
        found = hurry(job, line, piece, held, tmp_path)
        part = job.pieces[piece]
        if not found and is_of_an_update(part.source, line) and on_disk(job, piece, line):
            continue  # the disk orders what it is asked for; what is asked for too early is old: see below
        if bool(found) == covered(part.source, part.slots, line):
            wrong.append(f"piece {piece}, line {line.number}, {line.text}: {found}")
    assert wrong == []


@pytest.mark.parametrize(("name", "kept"), some_jobs(["by the CPU", "around", "summed"]))
def test_a_wait_that_is_not_there(name: str, kept: int, tmp_path: Path) -> None:
    """Each is found, but that for an update by the CPU which the next iteration waits for as it enters (where it looks
    at what is there), and that for a gradient which comes when it is asked for."""
    job = JOBS[name]()
    wrong = []
    for piece, line in lines_to_try(job, kept):
        found, settled = changed(job, without(job.pieces[piece].source, line), piece, tmp_path)
        part = job.pieces[piece]
        harmless = line.slot in settled and is_of_an_update(part.source, line)
        harmless |= comes_by_itself(part.source, part.slots, line)
        made_up_for = line.slot in settled and is_of_an_update(part.source, line)
        if bool(found) == harmless and not (found and made_up_for):
            wrong.append(f"piece {piece}, line {line.number}, {line.text}: {found}")
    assert wrong == []


@pytest.mark.parametrize(("name", "kept"), some_jobs(["everything"]))
def test_a_wait_that_is_late(name: str, kept: int, tmp_path: Path) -> None:
    """Each stands after the next line that needs what it waits for.

    Where that is a `del`, the transfer holds the memory until the wait, and all is well; if it did not, the race would
    be found. (A disk's threads could not work without holding it.) The thread of updates waits by itself for what it
    reads.
    """
    job = JOBS[name]()
    wrong = []
    for piece, line in lines_to_try(job, kept):
        source = job.pieces[piece].source
        after = [r for r in readers(source, line) if not r.text.startswith(("run.update_on_cpu(", "run.changed("))]
        slots = job.pieces[piece].slots
        if not after or covered(source, slots, line) or comes_by_itself(source, slots, line):
            continue
        late = moved(source, line, after[0].number + 1)
        found, _ = changed(job, late, piece, tmp_path)
        if found:
            continue
        with holding_nothing():
            unheld, _ = changed(job, late, piece, tmp_path)
        held = any("offload reads it" in text for text in unheld) or on_disk(job, piece, line)
        if not after[0].text.startswith(("del ", "run.keep_offloaded(")) or not held:
            wrong.append(f"piece {piece}, line {line.number}, {line.text}, after {after[0]}")
    assert wrong == []
