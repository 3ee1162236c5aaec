"""What is asked of a card, in which order, with the card's part made up: streams that only note what is put on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stowage.flows.benchmarks.gpu import contestant as _gpu_contestant
from stowage.flows.benchmarks.gpu.contestant import Request, compete
from stowage.flows.benchmarks.gpu.first.first import llama
from stowage.flows.benchmarks.gpu.job import GpuJob, limit_memory
from stowage.flows.benchmarks.gpu.lanes import GARBAGE, HostLanes, LateCudaLanes, late_lanes
from stowage.flows.benchmarks.gpu.pinned import CountedLanes, Pinned
from stowage.flows.benchmarks.gpu.race import REFERENCE, contestants
from stowage.stages.device.peaks import AllocatorPeaks
from stowage.stages.device.tiers import OFFLOAD, RELOAD


class Event:
    """Notes where it was recorded."""

    def __init__(self, **_: Any) -> None:
        self.on: object = None

    def record(self, stream: object = None) -> None:
        self.on = stream

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, other: Event) -> float:
        return 5.0


class Memory:
    """A tensor that notes what is done with it, and on which stream."""

    def __init__(self, name: str, card: Card) -> None:
        self.name, self.card = name, card

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        assert non_blocking
        self.card.put(f"{source.name} to {self.name}")

    def fill_(self, value: int) -> None:
        assert value == GARBAGE
        self.card.put(f"garbage in {self.name}")


class Card:
    """Streams in place of `torch.cuda`'s."""

    def __init__(self) -> None:
        self.main = SimpleNamespace(name="compute")
        self.current = self.main
        self.done: list[tuple[str, str]] = []

    def put(self, what: str) -> None:
        self.done.append((self.current.name, what))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    names = iter([OFFLOAD, RELOAD] * 10)
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "Stream": lambda device: SimpleNamespace(name=next(names)),
        "Event": Event,
        "stream": made.stream,
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device: made.current,
        "_sleep": lambda cycles: made.put(f"sleep {cycles}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_late_copies_sleep_first_and_their_destination_is_garbage(card: Card) -> None:
    lanes = late_lanes("cuda", ("reload",), 0.001)
    assert isinstance(lanes, LateCudaLanes)
    assert [what for _, what in card.done] == ["sleep 10000000"] * 2, "how fast its clock is"
    card.done.clear()
    up, down = Memory("up", card), Memory("down", card)
    anything: Any = lanes
    anything.copy(lanes.side(RELOAD), up, down)
    anything.copy(lanes.side(OFFLOAD), down, up)
    assert card.done == [
        (RELOAD, "garbage in up"),
        (RELOAD, "sleep 2000000"),  # 1 ms of 10 million cycles in 5 ms
        (RELOAD, "down to up"),
        (OFFLOAD, "up to down"),
    ]
    card.done.clear()
    anything.copy(lanes.compute(), up, down)
    assert card.done == [("compute", "down to up")]


def test_a_late_offload_leaves_its_slot_alone(card: Card) -> None:
    lanes: Any = late_lanes("cuda", ("offload",), 0.001)
    card.done.clear()
    lanes.copy(lanes.side(OFFLOAD), Memory("down", card), Memory("up", card))
    assert card.done == [(OFFLOAD, "sleep 2000000"), (OFFLOAD, "up to down")]


def test_a_late_compute_stream_sleeps_where_it_is_asked_for(card: Card) -> None:
    lanes: Any = late_lanes("cuda", ("compute",), 0.001)
    card.done.clear()
    assert lanes.compute() is card.main
    assert card.done == [("compute", "sleep 2000000")]
    lanes.copy(lanes.side(RELOAD), Memory("up", card), Memory("down", card))
    assert card.done[1:] == [(RELOAD, "down to up")]


def test_lanes_on_time_do_not_sleep(card: Card) -> None:
    lanes: Any = late_lanes("cuda", (), 0.001)
    lanes.compute()
    lanes.copy(lanes.side(RELOAD), Memory("up", card), Memory("down", card))
    assert card.done == [(RELOAD, "down to up")]
    assert isinstance(late_lanes("cpu", (), 0.0), HostLanes)


def test_pinning_is_counted(card: Card, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, pin_memory=False, **how: real(min(n, 8), **how))
    counted = Pinned()
    lanes = CountedLanes(torch.device("cuda"), counted)
    lanes.pinned(10)
    assert capsys.readouterr().out == ""
    lanes.pinned(2 << 30)
    assert counted.nbytes == 10 + (2 << 30)
    assert counted.seconds > 0
    assert "pinned 2,048.0 MiB in 0.0 s" in capsys.readouterr().out


def test_limits_are_fractions_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=100 * (1 + i)))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    job = GpuJob("llama", {}, 1, 1, "float32", "cuda", 50, 0)
    for limit in (None, 100, 1000):
        limit_memory(job, limit)
    assert asked == [0.25, 0.5, 1.0]


def test_the_looser_limit_is_the_process_s(tmp_path: Path) -> None:
    job = GpuJob("llama", {}, 1, 1, "float32", "cuda", 50, 0)
    limits = {n: r.limit(job) for n, r in contestants(job, {}, 1, tmp_path, tmp_path, 32).items()}
    assert limits["FSDP2, CPUOffloadPolicy"] == 50
    assert limits["FSDP2, CPUOffloadPolicy, 2 × the limit"] == 100
    assert limits[REFERENCE] == limits["plain PyTorch, 8 layers"] == limits["plain PyTorch, 16 layers"] == -1


def test_weights_of_strict_jobs_are_told_apart() -> None:
    job = replace(llama(1, 64, 256, 1, 8, "bfloat16", "cpu"), strict=True)
    jobs = (job, job, replace(job, seed=1), replace(job, strict=False))
    found = [compete(Request("plain", asdict(each), 1, False, None, "", "", "")).weights for each in jobs]
    assert found[0] == found[1] != ""
    assert found[2] not in ("", found[0])
    assert found[3] == "", "it takes time"


def test_what_the_allocator_counts_is_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries of the warm-up are told apart from those of timed iterations."""
    seen = iter([AllocatorPeaks(1, 2, 3, 0, 0), AllocatorPeaks(4, 5, 6, 2, 0), AllocatorPeaks(7, 8, 9, 5, 1)])
    monkeypatch.setattr(_gpu_contestant, "Peaks", lambda device: SimpleNamespace(now=lambda: next(seen)))
    job = llama(1, 64, 256, 1, 8, "float32", "cpu")
    found = compete(Request("plain", asdict(job), 1, False, None, "", "", ""))
    assert (found.requested_bytes, found.peak_bytes, found.reserved_bytes) == (7, 8, 9)
    assert (found.retries, found.timed_retries, found.out_of_memory) == (5, 3, 1)


def test_without_a_card_nothing_is_counted() -> None:
    job = llama(1, 64, 256, 1, 8, "float32", "cpu")
    found = compete(Request("plain", asdict(job), 1, False, None, "", "", ""))
    assert found.peak_bytes > 0, "from the allocator's events"
    assert (found.requested_bytes, found.reserved_bytes, found.out_of_memory) == (-1, -1, -1)
    assert (found.retries, found.timed_retries) == (-1, -1)
