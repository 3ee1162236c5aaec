"""The orders that tiers and updates by the CPU keep inside, each taken out: what the model of streams says without."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from stowage.stages.device.tiers import PinnedTier
from stowage.stages.device.tiers.lanes import LaneJob as Copy
from stowage.stages.device.tiers.lanes import Lanes
from stowage.stages.ir.errors import StowageError
from tests.matrix import some
from tests.streams.checking import ORDERS, Found, Job, check
from tests.streams.device_mode import DeviceMode
from tests.streams.disk_turns import UPDATES
from tests.streams.jobs import disk_for, hand_job
from tests.streams.machine import HOST
from tests.streams.mutating import holding_nothing, lines_of, moved, with_source

HOST_TIER = {
    "before an offload": ("offload", "compute"),
    "before a reload": ("reload", "compute"),
    "at the wait for an offload": ("compute", "offload"),
    "at the wait for a reload": ("compute", "reload"),
}
"""See `host`."""

DISK_TIER = {
    "before an offload": ("disk offload", "compute"),
    "before a reload": ("disk reload", "compute"),
    "a chunk is in its buffer before it is written": ("disk offload thread 0", "disk offload"),
    "a chunk has left its buffer before the next": ("disk reload thread 0", "disk reload"),
    "at the wait for a reload, the host's": (HOST, "disk reload thread"),
}
"""See `disk` and `disk_mover`."""

CPU_UPDATES = {
    "an update after the offload of its gradient": (UPDATES, "offload"),
}
"""See `CPU_UPDATES` and `PinnedTier.content`."""


IMPLIED = {
    "a reload after the offload of its slot": (("reload", "offload"), ("compute", "offload")),
    "an offload after the reloads of its slot": (("offload", "reload"), ("compute", "reload")),
    "an update after what still reads its weight": ((UPDATES, "reload"), ("compute", "reload")),
}
"""Orders that steps do not need, since waits of the step, the second, imply them; tiers promise them all the same."""


def found_without(job: Job, ignored: set[tuple[str, str]], folder: Path) -> Found:
    """What is found in one of the orders."""
    found = Found()
    for order in ORDERS.values():
        machine = order()
        machine.ignored = set(ignored)
        found = check(job, machine, disk_for(job, folder))
        if found.races:
            break
    return found


def between(found: Found, ignored: tuple[str, str]) -> bool:
    """Whether a race is between the two that the order was between."""
    waiting, other = ignored
    lanes = [race.lanes for race in found.races]
    return any(any(w.startswith(waiting) for w in pair) and any(o.startswith(other) for o in pair) for pair in lanes)


@pytest.mark.parametrize("order", HOST_TIER)
def test_pinned_memory(order: str, tmp_path: Path) -> None:
    found = found_without(hand_job("batchnorm", "adamw", "at once"), {HOST_TIER[order]}, tmp_path)
    assert between(found, HOST_TIER[order]), found.all()[:3]


@pytest.mark.parametrize("order", DISK_TIER)
def test_the_disk(order: str, tmp_path: Path) -> None:
    found = found_without(hand_job("batchnorm", "adamw", "disk"), {DISK_TIER[order]}, tmp_path)
    assert found.races, found.all()[:3]


@pytest.mark.parametrize("order", CPU_UPDATES)
def test_updates_by_the_cpu(order: str, tmp_path: Path) -> None:
    found = found_without(hand_job("batchnorm", "adamw", "by the CPU"), {CPU_UPDATES[order]}, tmp_path)
    assert between(found, CPU_UPDATES[order]), found.all()[:3]


def in_host(found: Found) -> Found:
    """Races in memory of the host."""
    return Found(races=[race for race in found.races if race.memory.startswith("host memory")])


@pytest.mark.parametrize("order", IMPLIED)
def test_an_order_that_waits_imply(order: str, tmp_path: Path) -> None:
    """Without it alone nothing is found; without both there is a race between the two, in memory of the host."""
    own, wait = IMPLIED[order]
    job = hand_job("batchnorm", "adamw", "by the CPU" if own[0] == UPDATES else "at once")
    assert found_without(job, {own}, tmp_path).all() == []
    assert not between(in_host(found_without(job, {wait}, tmp_path)), own)
    assert between(in_host(found_without(job, {own, wait}, tmp_path)), own)


@pytest.mark.parametrize("wait", ["disk offload thread", "disk reload thread"])
def test_copies_of_one_place_on_the_disk(wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy waits for those before it of the same place. Waits of the step imply that too."""
    job, waits = hand_job("batchnorm", "adamw", "disk"), {(HOST, wait)}

    def in_file(found: Found) -> bool:
        return any(race.memory.endswith("in the file") for race in found.races)

    assert not in_file(found_without(job, waits, tmp_path))
    submit = Lanes.submit

    def unordered(self: Lanes, copy: Copy) -> None:
        copy.after = []
        submit(self, copy)

    monkeypatch.setattr(Lanes, "submit", unordered)
    assert found_without(job, set(), tmp_path).all() == []
    assert in_file(found_without(job, waits, tmp_path))


@pytest.mark.parametrize("way", some(["everything", "by the CPU", "around"], keep=["everything"]))
def test_a_release_before_the_last_reader(way: str, tmp_path: Path) -> None:
    """`run.free` and `del` right before the line that needs the memory last. (`del` before a wait: see waits.)"""
    job = hand_job("batchnorm", "adamw", way)
    source = job.pieces[0].source
    tried = 0
    for release in lines_of(source, r"^run\.free\(|^del \w+$"):
        name = release.slot or release.text.removeprefix("del ")
        words = rf'"{name}"|(?<![\w."]){name}(?!\w)'
        uses = [
            u for u in lines_of(source, words) if not u.text.startswith("run.update_on_cpu(")
        ]  # of what is offloaded
        before = [u for u in uses if u.number < release.number]
        if before and not (release.text.startswith("del ") and "run.wait(" in before[-1].text):
            tried += 1
            with_early = with_source(job, moved(source, release, before[-1].number))
            assert found_early(with_early, tmp_path), f"line {release.number}, {release.text}, before {before[-1]}"
    assert tried >= 10


def found_early(job: Job, folder: Path) -> list[str]:
    """What is found, or why the text is refused."""
    try:
        return check(job, ORDERS["the host ahead"](), disk_for(job, folder)).all()
    except StowageError as refused:
        return [str(refused)]


def test_what_is_packed_is_held_until_the_wait(tmp_path: Path) -> None:
    """A tensor with gaps goes down as a copy without them, which nobody but the transfer holds."""
    for holding, expected in ((nullcontext(), False), (holding_nothing(), True)):
        assert bool(packed_races(holding)) == expected


def packed_races(holding: AbstractContextManager[None]) -> list[str]:
    """Of an offload of every other column, and memory that is taken and written before the wait."""
    machine = ORDERS["the host ahead"]()
    tier = PinnedTier(lanes=machine)
    with holding, DeviceMode(machine):
        tier.reserve({"a": 4 * 8 * 4})
        whole = torch.ones(4, 16, device="cpu")
        transfer = tier.offload("a", whole[:, ::2])
        torch.zeros(4, 8, device="cpu").add_(1)
        transfer.wait()
    machine.drain()
    return [str(race) for race in machine.shadow.races]
