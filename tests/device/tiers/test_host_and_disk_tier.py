"""Host memory and the disk behind it: bytes come back from both, each event is needed, and buffers are bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.device.tiers import OFFLOAD, RELOAD, DelayedTier, DiskTier, HostAndDiskTier, PinnedTier
from stowage.stages.device.tiers.base import Stream
from stowage.stages.ir.errors import IllegalPlanError, PlanMismatchError, StowageError
from tests.device.tiers.model_lanes import ModelLanes
from tests.device.tiers.moving import PAGE, random_bytes
from tests.device.tiers.thread_lanes import ThreadLanes, host_and_disk
from tests.matrix import examples

CHUNK = 2 * PAGE


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[HostAndDiskTier]:
    made = host_and_disk(tmp_path, chunk_bytes=CHUNK)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["in host", "on disk"])
@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, CHUNK, CHUNK + 1, 5 * CHUNK + 77])
def test_bytes_come_back(tier: HostAndDiskTier, name: str, nbytes: int) -> None:
    tier.reserve({"in host": nbytes, "on disk": nbytes}, ["on disk"])
    tensor = random_bytes(nbytes)
    assert not tier.written(name)
    tier.offload(name, tensor).wait()
    assert tier.written(name)
    back = torch.zeros_like(tensor)
    tier.reload(name, back).wait()
    assert torch.equal(tensor, back)


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("make", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3]])
def test_strides_and_gaps(tier: HostAndDiskTier, on_disk: bool, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tier.reserve({"a": 96}, ["a"] if on_disk else [])
    one, two = make(torch.randn(4, 6)), make(torch.zeros(4, 6))
    tier.offload("a", one).wait()
    tier.reload("a", two).wait()
    assert torch.equal(one, two)


steps = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 1000)), max_size=30)


@settings(max_examples=examples(40), deadline=None)
@given(steps)
def test_a_reload_sees_the_offload_before_it(program: list[tuple[bool, int, int]]) -> None:
    """Any sequence on slots of both places, nothing waited for before the end: reloads have the bytes of their turn."""
    sizes = {"0": 3 * CHUNK + 5, "1": 100, "2": CHUNK, "3": 2 * CHUNK}
    with tempfile.TemporaryDirectory() as folder:
        tier = host_and_disk(Path(folder), chunk_bytes=CHUNK)
        tier.reserve(sizes, ["0", "1"])
        current: dict[str, int] = {}
        transfers, reloads = [], []
        for is_offload, slot, seed in program:
            name = str(slot)
            if is_offload:
                current[name] = seed
                transfers.append(tier.offload(name, random_bytes(sizes[name], seed)))
            elif name in current:
                back = torch.zeros(sizes[name], dtype=torch.uint8)
                reloads.append((back, current[name]))
                transfers.append(tier.reload(name, back))
        for transfer in transfers:
            transfer.wait()
        for back, seed in reloads:
            assert torch.equal(back, random_bytes(back.numel(), seed))
        tier.close()


# On a model of streams: the host is ahead of the device by as much as can be.


class Machine:
    """A disk tier for tensors of a modelled device."""

    def __init__(self, folder: Path, order: tuple[str, ...], ignored: set[tuple[str, str]]) -> None:
        self.lanes = ModelLanes(lambda ready: min(ready, key=order.index))
        self.lanes.ignored = ignored
        self.tier = DiskTier(folder, chunk_bytes=CHUNK, lanes=self.lanes)
        self.tier.reserve({"a": 4 * CHUNK})
        self.wrong = False

    def fill(self, block: torch.Tensor, value: float) -> None:
        self.lanes.run(lambda: block.fill_(value))

    def expect(self, block: torch.Tensor, value: float) -> None:
        self.lanes.run(lambda: self.judge(block, value))

    def judge(self, block: torch.Tensor, value: float) -> None:
        self.wrong |= not bool((block == value).all())


def offload_after_its_kernel(machine: Machine) -> None:
    block, back = torch.zeros(CHUNK), torch.zeros(CHUNK)
    machine.fill(block, 1.0)
    machine.tier.offload("a", block).wait()
    machine.tier.reload("a", back).wait()
    machine.expect(back, 1.0)


def reload_into_memory_still_read(machine: Machine) -> None:
    block, other = torch.zeros(CHUNK), torch.ones(CHUNK)
    machine.tier.offload("a", other).wait()
    machine.fill(block, 5.0)
    machine.expect(block, 5.0)
    machine.tier.reload("a", block).wait()
    machine.expect(block, 1.0)


@pytest.mark.parametrize("order", [("compute", "offload", "reload"), ("reload", "offload", "compute")])
@pytest.mark.parametrize(
    ("program", "needed"),
    [(offload_after_its_kernel, ("offload", "compute")), (reload_into_memory_still_read, ("reload", "compute"))],
)
def test_each_event_is_needed(
    tmp_path: Path, program: Callable[[Machine], None], needed: tuple[str, str], order: tuple[str, ...]
) -> None:
    """Each program is right in every order, and wrong without the waits of its stream where computing is late."""
    for ignored in (set[tuple[str, str]](), {needed}):
        machine = Machine(tmp_path, order, ignored)
        program(machine)
        machine.tier.close()
        machine.lanes.drain()
        assert machine.wrong == (bool(ignored) and order[0] != "compute")


# Memory of the host.


def test_buffers_are_allocated_once_and_counted(tmp_path: Path) -> None:
    host, disk = ThreadLanes(), ThreadLanes()
    tier = HostAndDiskTier(PinnedTier(lanes=host), DiskTier(tmp_path, chunk_bytes=CHUNK, threads=2, lanes=disk))
    tier.reserve({"a": 4096, "b": 50 * CHUNK, "c": 60 * CHUNK}, ["b", "c"])
    for _ in range(3):
        moved = [tier.offload(name, random_bytes(nbytes)) for name, nbytes in (("b", 50 * CHUNK), ("c", 60 * CHUNK))]
        for transfer in moved:
            transfer.wait()
    assert disk.allocated == [4 * CHUNK]
    assert host.allocated == [4096]
    assert (tier.host_bytes, tier.staging_bytes) == (4096 + 4 * CHUNK, 0)
    assert DiskTier(tmp_path).host_bytes == 0, "below the RAM they are the device's"
    tier.close()


def test_a_name_keeps_its_place(tier: HostAndDiskTier) -> None:
    tier.reserve({"a": 8, "b": 8}, ["b"])
    tier.offload("a", torch.ones(2)).wait()
    tier.offload("b", torch.ones(2)).wait()
    tier.reserve({"a": 8, "b": 8, "c": 8}, ["a", "c"])
    for name in "ab":
        back = torch.zeros(2)
        tier.reload(name, back).wait()
        assert (back == 1).all()
    assert (tier.disk.file_bytes, tier.host.host_bytes) == (2 * PAGE, 8)


def test_host_memory_alone_has_no_disk() -> None:
    tier = PinnedTier(lanes=ThreadLanes())
    with pytest.raises(PlanMismatchError, match="keeps 'a' on a disk behind the host, and offload_dir is empty"):
        tier.reserve({"a": 8}, ["a"])


# Beside each other.


def test_the_host_does_not_wait_for_the_disk(tier: HostAndDiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the disk that hangs holds up others to the disk, and nothing else."""
    go, write = threading.Event(), os.pwritev

    def hanging(*arguments: object) -> int:
        go.wait(30)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", hanging)
    tier.reserve({"a": CHUNK, "b": CHUNK}, ["a"])
    slow = tier.offload("a", random_bytes(CHUNK))
    tier.offload("b", random_bytes(CHUNK, 1)).wait()
    back = torch.zeros(CHUNK, dtype=torch.uint8)
    tier.reload("b", back).wait()
    assert torch.equal(back, random_bytes(CHUNK, 1))
    assert not slow.done()
    go.set()
    slow.wait()


def test_spans_of_both(tier: HostAndDiskTier) -> None:
    tier.record = True
    tier.reserve({"a": CHUNK, "b": CHUNK}, ["a"])
    for name in "ab":
        tier.offload(name, random_bytes(CHUNK)).wait()
        tier.reload(name, random_bytes(CHUNK)).wait()
    assert [(s.stream, s.name, s.nbytes) for s in tier.spans] == [
        (OFFLOAD, "a", CHUNK),
        (RELOAD, "a", CHUNK),
        (OFFLOAD, "b", CHUNK),
        (RELOAD, "b", CHUNK),
    ]
    assert tier.record


@pytest.mark.parametrize("stream", [OFFLOAD, RELOAD])
def test_late_and_exact(tmp_path: Path, stream: Stream) -> None:
    tier = DelayedTier(host_and_disk(tmp_path, chunk_bytes=CHUNK), stream, 0.02)
    tier.reserve({"a": 4 * CHUNK, "b": 4 * CHUNK}, ["a"])
    tensors = {"a": random_bytes(4 * CHUNK, 1), "b": random_bytes(4 * CHUNK, 2)}
    for name, tensor in tensors.items():
        tier.offload(name, tensor)
        assert torch.equal(tier.content(name, tensor), tensor), "after the copy that is late"
    backs = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    waits = [tier.reload(name, back) for name, back in backs.items()]
    for transfer in waits:
        transfer.wait()
    assert all(torch.equal(backs[name], tensors[name]) for name in tensors)
    tier.close()


# Updates by the CPU.


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_cpu_computes_in_the_lower_tier(tier: HostAndDiskTier, on_disk: bool) -> None:
    tier.reserve({"a": 24}, ["a"] if on_disk else [])
    like = torch.empty(2, 3, device="meta").t()
    tier.offload("a", torch.arange(6.0).view(2, 3).t()).wait()
    content = tier.content("a", like)
    assert content.stride() == like.stride()
    content += 1
    tier.keep("a", content)
    back = torch.zeros(2, 3).t()
    tier.reload("a", back).wait()
    assert torch.equal(back, torch.arange(1.0, 7.0).view(2, 3).t())


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_the_cpu_made_is_kept(tier: HostAndDiskTier, on_disk: bool) -> None:
    """A new state: nothing was there before."""
    tier.reserve({"a": 12}, ["a"] if on_disk else [])
    tier.keep("a", torch.arange(3.0))
    assert tier.written("a")
    back = torch.zeros(3)
    tier.reload("a", back).wait()
    assert torch.equal(back, torch.arange(3.0))


# Mistakes.


def test_a_failure_names_tensor_and_folder(tier: HostAndDiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    tier.reserve({"a": 8}, ["a"])
    with pytest.raises(IllegalPlanError, match="never offloaded"):
        tier.reload("a", torch.zeros(2))
    with pytest.raises(StowageError, match="meta"):
        tier.offload("a", torch.zeros(2, device="meta"))
    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(StowageError, match=r"'a' \(8 bytes\) could not be written to the offload file"):
        tier.offload("a", torch.zeros(2)).wait()


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from tests.device.tiers.thread_lanes import host_and_disk
tier = host_and_disk(Path(sys.argv[1]))
tier.reserve({"a": 64 << 20, "b": 64 << 20}, ["a"])
tier.offload("a", torch.zeros(16 << 20)).wait()
tier.offload("b", torch.zeros(16 << 20)).wait()
print(os.listdir(sys.argv[1]), flush=True)
tier.offload("a", torch.zeros(16 << 20))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert ended.stdout.strip() == "[]", "nothing to see while it runs either"
    assert list(tmp_path.iterdir()) == []
