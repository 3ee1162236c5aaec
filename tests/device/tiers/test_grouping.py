"""Allocations in powers of two hold everything, and waste little where there is enough to fill them with."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.device.tiers.grouping import ALIGNMENT, group_allocations, power_of_two, wasted_bytes
from tests.formulations.offload.offload_problems import GIB, LLAMA2_7B, LLAMA3_70B, llama, rtx3060
from tests.matrix import examples

MIB = 1 << 20


def checked(sizes: dict[str, int]) -> int:
    """Every tensor lies once, aligned, within its allocation, beside no other; returns the waste."""
    allocations = group_allocations(sizes)
    placed = [name for a in allocations for name in a.names]
    assert sorted(placed) == sorted(sizes)
    for a in allocations:
        assert a.nbytes == power_of_two(a.nbytes)
        end = 0
        for name, offset in sorted(zip(a.names, a.offsets), key=lambda item: (item[1], sizes[item[0]])):
            assert offset % ALIGNMENT == 0
            assert offset >= end
            end = offset + sizes[name]
        assert end <= a.nbytes
    return wasted_bytes(allocations, sizes)


def test_llamas() -> None:
    for shape in (LLAMA2_7B, LLAMA3_70B):
        for itemsize, copies in ((4, 3), (2, 1)):
            groups = llama(rtx3060(), shape, itemsize=itemsize).groups
            sizes = {f"{t.name}.{c}": t.nbytes for g in groups for t in (*g.tensors, *g.pinned) for c in range(copies)}
            total = sum(sizes.values())
            assert checked(sizes) <= 0.02 * total
            # What asking for each tensor alone takes.
            assert sum(map(power_of_two, sizes.values())) > 1.1 * total


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 512 * MIB), max_size=200))
def test_realistic_lists(numbers: list[int]) -> None:
    sizes = {f"t{i}": n for i, n in enumerate(numbers)}
    # A few tensors cannot fill a power of two, as one alone cannot; then the bound is a factor of two.
    assert checked(sizes) <= sum(sizes.values()) + 2 * ALIGNMENT * len(sizes)


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(st.lists(st.integers(64 * 1024, 256 * MIB), min_size=60, max_size=250))
def test_many_tensors_waste_little(numbers: list[int]) -> None:
    sizes = {f"t{i}": n for i, n in enumerate(numbers)}
    assert checked(sizes) <= 0.02 * sum(sizes.values()) + 64 * MIB


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5000), max_size=60))
def test_tiny_tensors(numbers: list[int]) -> None:
    sizes = {f"t{i}": n for i, n in enumerate(numbers)}
    assert checked(sizes) <= sum(sizes.values()) + 2 * ALIGNMENT * len(sizes)


def test_larger_than_the_largest_and_exact() -> None:
    assert [a.nbytes for a in group_allocations({"a": 5 * GIB})] == [8 * GIB]
    assert [a.nbytes for a in group_allocations({"a": GIB, "b": GIB})] == [2 * GIB]
    assert group_allocations({}) == ()
