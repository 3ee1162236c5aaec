"""The pinned tier on a model of streams and events: right in every order that the events allow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.device.tiers import PinnedTier
from stowage.stages.device.tiers.host import pinned_bytes
from stowage.stages.ir.errors import IllegalPlanError, StowageError
from tests.device.tiers.model_lanes import ModelLanes
from tests.matrix import examples

COMPUTE_FIRST, COMPUTE_LAST = (("compute", "offload", "reload"), ("reload", "offload", "compute"))


def preferring(order: tuple[str, ...]) -> Callable[[list[str]], str]:
    return lambda ready: min(ready, key=order.index)


class Machine:
    """A program on the model: memory blocks as a caching allocator hands them out, at once and again."""

    def __init__(self, choose: Callable[[list[str]], str]) -> None:
        self.lanes = ModelLanes(choose)
        self.tier = PinnedTier(lanes=self.lanes, groups=[["a", "b"]])
        self.tier.reserve({"a": 8, "b": 8, "c": 8})
        self.wrong: list[str] = []

    def fill(self, block: torch.Tensor, value: float) -> None:
        self.lanes.run(lambda: block.fill_(value))

    def expect(self, block: torch.Tensor, value: float, what: str) -> None:
        self.lanes.run(lambda: None if (block == value).all() else self.wrong.append(what))


operations = st.lists(
    st.tuples(st.sampled_from(["produce", "offload", "reload", "wait", "check"]), st.integers(0, 5), st.integers(0, 2)),
    max_size=60,
)


@settings(max_examples=examples(300), deadline=None)
@given(operations, st.randoms(use_true_random=False))
def test_any_program_in_any_order(program: list[tuple[str, int, int]], random: object) -> None:
    """Blocks are reused as soon as their transfers were waited for; every value read is the right one."""
    machine = Machine(random.choice)  # type: ignore[attr-defined]
    blocks = [torch.zeros(2) for _ in range(6)]
    holds: dict[int, float] = {}
    lower_tier: dict[str, float] = {}
    pending: dict[int, list[tuple[str, str, object]]] = {}
    counter = 0.0
    for verb, index, slot in program:
        block, name = blocks[index], "abc"[slot]
        under_way = pending.get(index, [])
        if verb == "produce" and not under_way:
            counter += 1
            holds[index] = counter
            machine.fill(block, counter)
        elif verb == "offload" and index in holds and not any(kind == "reload" for kind, _, _ in under_way):
            pending.setdefault(index, []).append(("offload", name, machine.tier.offload(name, block)))
            lower_tier[name] = holds[index]
        elif verb == "reload" and name in lower_tier and not under_way:
            holds[index] = lower_tier[name]
            pending.setdefault(index, []).append(("reload", name, machine.tier.reload(name, block)))
        elif verb == "wait" and under_way:
            under_way.pop(0)[2].wait()  # type: ignore[attr-defined]
        elif verb == "check" and index in holds and not any(kind == "reload" for kind, _, _ in under_way):
            machine.expect(block, holds[index], f"block {index}")
    machine.tier.close()
    assert machine.wrong == []


def offload_after_its_kernel(machine: Machine) -> None:
    block, back = torch.zeros(2), torch.zeros(2)
    machine.fill(block, 1.0)
    machine.tier.offload("a", block).wait()
    machine.tier.reload("a", back).wait()
    machine.expect(back, 1.0, "offload")


def reload_into_memory_still_read(machine: Machine) -> None:
    block, other = torch.zeros(2), torch.ones(2)
    machine.tier.offload("a", other).wait()
    machine.lanes.drain()
    machine.fill(block, 5.0)
    machine.expect(block, 5.0, "the tensor that was here before")
    machine.tier.reload("a", block).wait()
    machine.expect(block, 1.0, "reload")


def reload_after_the_offload_of_its_slot(machine: Machine) -> None:
    block, back = torch.ones(2), torch.zeros(2)
    machine.tier.offload("a", block)
    machine.tier.reload("a", back).wait()
    machine.expect(back, 1.0, "reload")


def offload_after_the_reload_of_its_slot(machine: Machine) -> None:
    one, two, back = torch.ones(2), torch.full((2,), 2.0), torch.zeros(2)
    machine.tier.offload("a", one).wait()
    machine.lanes.drain()
    up = machine.tier.reload("a", back)
    machine.tier.offload("a", two).wait()
    up.wait()
    machine.expect(back, 1.0, "overtaken reload")


def compute_after_the_reload(machine: Machine) -> None:
    back = torch.zeros(2)
    machine.tier.offload("a", torch.ones(2)).wait()
    machine.lanes.drain()
    machine.tier.reload("a", back).wait()
    machine.expect(back, 1.0, "read")


def compute_after_the_offload(machine: Machine) -> None:
    block, back = torch.ones(2), torch.zeros(2)
    machine.tier.offload("a", block).wait()
    machine.fill(block, 2.0)
    machine.lanes.drain()
    machine.tier.reload("a", back).wait()
    machine.expect(back, 1.0, "stored")


@pytest.mark.parametrize(
    ("program", "needed", "order"),
    [
        (offload_after_its_kernel, ("offload", "compute"), COMPUTE_LAST),
        (reload_into_memory_still_read, ("reload", "compute"), COMPUTE_LAST),
        (reload_after_the_offload_of_its_slot, ("reload", "offload"), ("compute", "reload", "offload")),
        (offload_after_the_reload_of_its_slot, ("offload", "reload"), COMPUTE_FIRST),
        (compute_after_the_reload, ("compute", "reload"), COMPUTE_FIRST),
        (compute_after_the_offload, ("compute", "offload"), COMPUTE_FIRST),
    ],
)
def test_each_event_is_needed(
    program: Callable[[Machine], None], needed: tuple[str, str], order: tuple[str, ...]
) -> None:
    """Each program is right, and wrong without the waits of one stream for one other."""
    for ignored in (set[tuple[str, str]](), {needed}):
        machine = Machine(preferring(order))
        machine.lanes.ignored = ignored
        program(machine)
        machine.tier.close()
        assert bool(machine.wrong) == bool(ignored)


def test_tensors_are_held_until_the_wait() -> None:
    machine = Machine(preferring(COMPUTE_FIRST))
    transfer = machine.tier.offload("a", torch.ones(2))
    assert len(machine.tier._unwaited) == 1
    machine.lanes.drain()
    assert transfer.done()
    assert len(machine.tier._unwaited) == 1, "complete is not waited for"
    transfer.wait()
    transfer.wait()
    assert not machine.tier._unwaited
    assert not transfer._tensors


def test_strides_and_gaps() -> None:
    machine = Machine(preferring(COMPUTE_FIRST))
    machine.tier.reserve({"d": 96})
    for make in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3]):
        one, two = make(torch.randn(4, 6)), make(torch.zeros(4, 6))
        machine.tier.offload("d", one).wait()
        machine.tier.reload("d", two).wait()
        machine.lanes.drain()
        assert torch.equal(one, two)


def test_groups_share_buffers() -> None:
    tier = PinnedTier(lanes=ModelLanes(preferring(COMPUTE_FIRST)), groups=[["b", "a"], ["c", "d"]])
    tier.reserve({"a": 500, "b": 512, "c": 1000, "e": 3})
    assert [buffer.numel() for buffer in tier._buffers] == [1012, 1000, 3]
    assert tier.host_bytes == 1024 + 1024 + 4
    starts = {name: slot.content.storage_offset() for name, slot in tier._slot_of.items()}
    assert starts == {"b": 0, "a": 512, "c": 0, "e": 0}
    tier.reserve({"d": 5, "a": 500})
    assert len(tier._buffers) == 4
    assert tier.staging_bytes == 0
    assert [pinned_bytes(n) for n in (0, 1, 2, 3, 1 << 20, (1 << 20) + 1)] == [0, 1, 2, 4, 1 << 20, 1 << 21]


class _Counted(ModelLanes):
    """Hands out memory that nobody touches."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


def test_the_weights_of_a_transformer_waste_little() -> None:
    """Alone, each of the larger matrices (11,008 × 4,096, as Llama2-7B's) would waste half of itself."""
    tier = PinnedTier(lanes=_Counted(preferring(COMPUTE_FIRST)))
    layer = {"q": 4096 * 64, "k": 4096 * 64, "v": 4096 * 64, "o": 4096 * 64} | dict.fromkeys("gud", 11008 * 64)
    slots = {f"{number}.{name}": 4 * size for number in range(32) for name, size in layer.items()}
    tier.reserve(slots)
    assert sum(slots.values()) <= tier.host_bytes <= 1.02 * sum(slots.values())
    spans = sorted((slot.content.data_ptr(), slot.content.numel()) for slot in tier._slot_of.values())
    assert all(start + length <= other for (start, length), (other, _) in pairwise(spans)), "slots overlap"
    assert {name: slot.content.numel() for name, slot in tier._slot_of.items()} == slots


def test_spans() -> None:
    machine = Machine(preferring(COMPUTE_FIRST))
    machine.tier.record = True
    machine.tier.offload("a", torch.ones(2)).wait()
    machine.tier.reload("a", torch.zeros(2)).wait()
    assert list(machine.tier.spans) == []
    machine.lanes.drain()
    down, up = machine.tier.spans
    assert (down.stream, down.name, down.nbytes, up.stream) == ("offload", "a", 8, "reload")
    assert down.start_s < down.end_s <= up.start_s < up.end_s


def test_mistakes_and_other_devices() -> None:
    machine = Machine(preferring(COMPUTE_FIRST))
    with pytest.raises(IllegalPlanError, match="never offloaded"):
        machine.tier.reload("a", torch.zeros(2))
    with pytest.raises(StowageError, match="meta"):
        machine.tier.offload("a", torch.zeros(2, device="meta"))
    assert not machine.tier.written("a")
    machine.tier.offload("a", torch.zeros(2)).wait()
    assert machine.tier.written("a")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu() -> None:
    with pytest.raises(StowageError, match="needs a CUDA device"):
        PinnedTier()
