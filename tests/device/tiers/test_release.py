"""Slots that nobody uses any more: their room serves others, and nothing that lives is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stowage.flows.benchmarks.main_job.host_time import NoLanes
from stowage.stages.device.tiers import DiskTier, HostAndDiskTier, NullTier, PinnedTier
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.plan import Slot
from stowage.stages.runtime.offload.offloading import Offloading
from tests.device.tiers.moving import PAGE, random_bytes
from tests.matrix import examples

KINDS = ("host", "disk", "host and disk", "null")


def make(kind: str, folder: Path) -> Any:
    match kind:
        case "host":
            return PinnedTier(lanes=NoLanes())
        case "disk":
            return DiskTier(folder, chunk_bytes=PAGE, threads=1)
        case "host and disk":
            return HostAndDiskTier(PinnedTier(lanes=NoLanes()), DiskTier(folder, chunk_bytes=PAGE, threads=1))
        case _:
            return NullTier()


@pytest.fixture(params=KINDS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = make(request.param, tmp_path)
    yield made
    made.close()


def taken_bytes(tier: Any) -> int:
    """Room that a tier holds, in its file and in the host."""
    match tier:
        case HostAndDiskTier():
            return tier.disk.file_bytes + tier.host.host_bytes
        case DiskTier():
            return tier.file_bytes
        case PinnedTier():
            return tier.host_bytes
        case _:
            return sum(content.numel() for content in tier._content.values())


def reserve(tier: Any, name: str, nbytes: int, on_disk: bool = False) -> None:
    tier.reserve({name: nbytes}, [name] if on_disk and isinstance(tier, HostAndDiskTier) else [])


def test_a_released_slot_is_gone_and_may_come_again(tier: Any) -> None:
    one, two = random_bytes(3 * PAGE, 1), random_bytes(5 * PAGE, 2)
    reserve(tier, "x", one.numel())
    tier.offload("x", one).wait()
    assert tier.written("x")
    tier.release(["x"])
    with pytest.raises(IllegalPlanError, match="'x' has no slot"):
        tier.offload("x", one)
    reserve(tier, "x", two.numel())
    with pytest.raises(IllegalPlanError, match="never offloaded"):
        tier.reload("x", torch.empty_like(two))
    tier.offload("x", two).wait()
    back = torch.empty_like(two)
    tier.reload("x", back).wait()
    assert torch.equal(back, two)


def test_what_is_not_there_is_released_quietly(tier: Any) -> None:
    tier.release(["nothing"])
    tier.release([])


def test_the_place_may_be_another(tmp_path: Path) -> None:
    """From the disk to the host and back."""
    tier = make("host and disk", tmp_path)
    content = random_bytes(PAGE, 3)
    for on_disk in (True, False, True):
        reserve(tier, "x", PAGE, on_disk)
        assert (tier._place("x") is tier.disk) == on_disk
        tier.offload("x", content).wait()
        back = torch.empty_like(content)
        tier.reload("x", back).wait()
        assert torch.equal(back, content)
        tier.release(["x"])
    tier.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_room_is_used_again(kind: str, tmp_path: Path) -> None:
    tier = make(kind, tmp_path)
    reserve(tier, "stays", 2 * PAGE)
    reserve(tier, "x", 8 * PAGE)
    before = taken_bytes(tier)
    for nbytes in (8, 4, 1, 8, 7):
        tier.release(["x"])
        reserve(tier, "x", nbytes * PAGE)
        assert taken_bytes(tier) <= before
    tier.close()


def test_gaps_that_touch_are_one(tmp_path: Path) -> None:
    """Slots that grow would otherwise make the file grow each time, for they fit in none of their own gaps."""
    tier = make("disk", tmp_path)
    for name in "abcd":
        reserve(tier, name, PAGE)
    tier.offload("d", random_bytes(PAGE, 4)).wait()
    tier.release(["a", "c"])
    tier.release(["b"])
    before = tier.file_bytes
    reserve(tier, "e", 3 * PAGE)
    assert tier.file_bytes == before
    tier.offload("e", random_bytes(3 * PAGE, 5)).wait()
    back = torch.empty(PAGE, dtype=torch.uint8)
    tier.reload("d", back).wait()
    assert torch.equal(back, random_bytes(PAGE, 4))
    tier.close()


Action = tuple[str, int, bool]
ACTIONS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(1, 5 * PAGE), st.booleans()), min_size=1, max_size=25
)


@settings(max_examples=examples(60))
@given(st.sampled_from(KINDS), ACTIONS)
def test_nothing_that_lives_is_touched(
    tmp_path_factory: pytest.TempPathFactory, kind: str, actions: list[Action]
) -> None:
    """Slots come and go in any order and size; each holds what was written there last."""
    tier = make(kind, tmp_path_factory.mktemp("release"))
    live: dict[str, torch.Tensor] = {}
    for number, (name, nbytes, on_disk) in enumerate(actions):
        if name in live:
            tier.release([name])
            del live[name]
        else:
            live[name] = random_bytes(nbytes, number)
            reserve(tier, name, nbytes, on_disk)
            tier.offload(name, live[name]).wait()
        for other, content in live.items():
            back = torch.empty_like(content)
            tier.reload(other, back).wait()
            assert torch.equal(back, content), f"{other} after {actions[: number + 1]}"
    if kind == "disk":
        used = sorted((tier._place[n], tier._sizes[n]) for n in live)
        whole = sorted([*used, *tier._gaps])
        assert [start for start, _ in whole] == [0, *(start + size for start, size in whole)][: len(whole)]
        assert sum(size for _, size in whole) == tier.file_bytes, "no byte is lost"
    tier.close()


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_that_grow(kind: str, tmp_path: Path) -> None:
    """Activations of longer and longer batches under the same names: old places go, weights stay where they are."""
    tier = make(kind, tmp_path)
    model = nn.Linear(64, 64)
    offloading = Offloading(tier, model, None)
    kept = Slot(0, "weight", model.weight.nbytes, "parameter", "offloaded", True)
    weight = model.weight.detach().clone()
    largest = 0
    for turn in range(1, 25):
        largest = turn * 2 * PAGE
        placement: Any = {"placement": "disk"} if kind == "host and disk" and turn % 2 else {}
        slots = [kept, *(Slot(i, f"x{i}", largest, "temporary", "device", False, **placement) for i in (1, 2))]
        offloading.enter(slots)
        contents = [random_bytes(largest, 10 * turn + i) for i in (1, 2)]
        for i, content in enumerate(contents, 1):
            offloading.offload(f"x{i}", content)
            offloading.wait(f"x{i}")
        for i, content in enumerate(contents, 1):
            offloading.reload(f"x{i}")
            back = offloading.wait(f"x{i}")
            assert back is not None
            assert torch.equal(back, content)
        assert taken_bytes(tier) <= 8 * largest + 4 * model.weight.nbytes, f"turn {turn}"
    offloading.fetch_all(["weight"])
    assert torch.equal(model.weight, weight)
    tier.close()
