"""RK-Rotor against every persistent schedule of small chains."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.chain import rk_rotor
from stowage.stages.formulations.chain.policies import fixed_policies, segments
from stowage.stages.formulations.chain.rk_rotor import ChainBlock, ChainOption, RkRotor, Slots, _equal_subproblems
from tests.formulations.chain.chain_machine import peak_of, persistent_schedules, time_of, with_drops
from tests.matrix import examples

SMALL = st.integers(0, 4)


@st.composite
def chains(draw: st.DrawFn, max_blocks: int = 4) -> list[ChainBlock]:
    """Blocks with one to three options, gradients that stay, and tails that may be cheaper."""
    count = draw(st.integers(1, max_blocks))
    inputs = [0] + [draw(SMALL) for _ in range(count)]
    blocks = []
    for b in range(count):
        last = b == count - 1
        output, gradient = (0, 0) if last else (inputs[b + 1], draw(SMALL))
        options, tails = [], []
        for _ in range(draw(st.integers(1, 2 if count == 4 else 3))):
            save = output + draw(SMALL)
            option = ChainOption(
                float(draw(st.integers(2, 9))), save, save + draw(SMALL), save + gradient + draw(SMALL)
            )
            options.append(option)
            if draw(st.booleans()):
                less = draw(st.integers(0, output))
                tails.append(
                    ChainOption(
                        option.time_s - draw(st.integers(0, 2)),
                        option.save_bytes - less,
                        option.forward_peak_bytes - less,
                        option.backward_peak_bytes - less,
                    )
                )
            else:
                tails.append(option)
        blocks.append(
            ChainBlock(
                input_bytes=inputs[b],
                gradient_bytes=gradient,
                resident_bytes=0 if last else draw(SMALL),
                options=options,
                last_run_options=tails,
                fast_time_s=math.inf if draw(st.integers(0, 7)) == 0 else float(draw(st.integers(1, 4))),
                fast_peak_bytes=output + draw(st.integers(0, 12)),
            )
        )
    return blocks


def resident(blocks: list[ChainBlock]) -> Slots:
    return np.array([b.resident_bytes for b in blocks])


def relative(blocks: list[ChainBlock], slots: int, slot_bytes: int) -> RkRotor:
    """The table that counts memory above the gradients that stay, which only long chains have."""
    with mock.patch.multiple(rk_rotor, SUB_PROBLEMS_AT_ONCE=0, FEWER_SUB_PROBLEMS=0):
        return RkRotor(blocks, slots, slot_bytes)


@pytest.mark.parametrize("make", [RkRotor, relative])
@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(blocks=chains())
def test_equals_exhaustive_search_for_every_memory(
    make: Callable[[list[ChainBlock], int, int], RkRotor], blocks: list[ChainBlock]
) -> None:
    all_of_them = [(peak_of(blocks, s), time_of(blocks, s)) for s in persistent_schedules(blocks)]
    slots = 1 + max(peak for peak, time_s in all_of_them if math.isfinite(time_s))
    table = make(blocks, slots, 1)
    for memory in range(slots + 1):
        best = min((time_s for peak, time_s in all_of_them if peak <= memory), default=math.inf)
        assert table.time_s(memory) == pytest.approx(best), f"memory {memory}"
        if math.isfinite(best):
            steps = table.sequence(memory)
            assert peak_of(blocks, steps) <= memory
            assert time_of(blocks, steps) == pytest.approx(best)
    finite = [m for m in range(slots + 1) if math.isfinite(table.time_s(m))]
    assert table.smallest_slots() == finite[0]


@pytest.mark.parametrize("make", [RkRotor, relative])
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(blocks=chains(max_blocks=6), slot_bytes=st.integers(2, 5))
def test_coarse_slots_never_exceed_memory_nor_beat_the_optimum(
    make: Callable[[list[ChainBlock], int, int], RkRotor], blocks: list[ChainBlock], slot_bytes: int
) -> None:
    coarse, fine = make(blocks, 30, slot_bytes), RkRotor(blocks, 30 * slot_bytes, 1)
    for slots in range(31):
        assert coarse.time_s(slots) >= fine.time_s(slots * slot_bytes) - 1e-9
        if math.isfinite(coarse.time_s(slots)):
            steps = coarse.sequence(slots)
            assert peak_of(blocks, steps) <= slots * slot_bytes
            assert time_of(blocks, steps) == pytest.approx(coarse.time_s(slots))


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(chains(max_blocks=6))
def test_never_worse_than_fixed_policies(blocks: list[ChainBlock]) -> None:
    policies = fixed_policies(blocks) | {"once": segments(blocks, len(blocks))}
    for name, steps in policies.items():
        complete = with_drops(steps)
        peak, time_s = peak_of(blocks, complete), time_of(blocks, complete)
        assert RkRotor(blocks, peak, 1).time_s(peak) <= time_s + 1e-9, name


def test_more_memory_is_never_slower() -> None:
    option, lean = ChainOption(2.0, 10, 10, 14), ChainOption(3.0, 4, 10, 14)
    block = ChainBlock(2, 2, 1, [option, lean], [option, lean], 1.0, 5)
    last = ChainBlock(2, 0, 0, [option, lean], [option, lean], 1.0, 5)
    table = RkRotor([block] * 11 + [last], 200, 1)
    times = [table.time_s(m) for m in range(201)]
    assert all(a >= b for a, b in pairwise(times))
    assert math.isinf(times[0])
    assert times[-1] == 24.0


def test_a_gradient_that_waits_counts_while_blocks_run_fast() -> None:
    """Block 2 leaves no room for x_1: block 0 runs fast again, while the gradient of x_2 waits (8 + 3 bytes)."""

    def block(inputs: int, gradient: int, save: int, fast: int) -> ChainBlock:
        option = ChainOption(1.0, save, save, save)
        return ChainBlock(inputs, gradient, 0, [option], [option], 1.0, fast)

    blocks = [block(0, 0, 10, 8), block(5, 3, 2, 2), block(1, 0, 6, 6)]
    table = RkRotor(blocks, 12, 1)
    assert math.isinf(table.time_s(10))
    assert table.time_s(11) == 3.0 + 3.0


def test_nothing_fits() -> None:
    option = ChainOption(1.0, 10, 10, 10)
    assert RkRotor([ChainBlock(0, 0, 0, [option], [option], 1.0, 1)], 9, 1).smallest_slots() is None


def test_a_hundred_blocks_and_five_hundred_slots() -> None:
    count, output = 100, 4
    options = [
        ChainOption(3.0, 30, 34, 44),
        ChainOption(3.5, 14, 34, 44),
        ChainOption(4.2, output, 34, 44),
    ]
    block = ChainBlock(output, output, 0, options, options, 1.0, 12)
    blocks = [*([block] * (count - 1)), ChainBlock(output, 0, 0, options, options, 1.0, 12)]
    table = RkRotor(blocks, 500, 1)
    least = table.smallest_slots()
    assert least is not None
    for memory in (least, 200, 500):
        steps = table.sequence(memory)
        assert peak_of(blocks, steps) <= memory
        assert time_of(blocks, steps) == pytest.approx(table.time_s(memory))
        assert math.isfinite(table.time_s(memory))
    assert least < 100
    assert table.time_s(500) < table.time_s(200) < table.time_s(least)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(chains(max_blocks=2), st.integers(2, 4))
def test_equal_blocks_share_rows_and_change_nothing(blocks: list[ChainBlock], count: int) -> None:
    """A chain of one repeated block, against every schedule."""
    repeated = [blocks[0]] * (count - 1) + [blocks[-1]]
    row, distinct = _equal_subproblems(repeated, resident(repeated))
    if len(blocks) == 2:
        # Of any length, ending before the last block or with it.
        assert len(distinct) <= 2 * count - 1
    assert all(row[s, t] == number for number, (s, t) in enumerate(distinct))
    all_of_them = [(peak_of(repeated, s), time_of(repeated, s)) for s in persistent_schedules(repeated)]
    slots = 1 + max((peak for peak, time_s in all_of_them if math.isfinite(time_s)), default=1)
    table = RkRotor(repeated, slots, 1)
    for memory in range(slots + 1):
        best = min((time_s for peak, time_s in all_of_them if peak <= memory), default=math.inf)
        assert table.time_s(memory) == pytest.approx(best), f"memory {memory}"


def test_rows_grow_with_the_chain_not_with_its_square() -> None:
    option = ChainOption(2.0, 2, 3, 4)
    block = ChainBlock(1, 1, 0, (option,), (option,), 1.0, 2)
    other = ChainBlock(2, 1, 0, (option,), (option,), 1.0, 2)
    for layers in (5, 50):
        chain = [block, other] * layers
        assert len(_equal_subproblems(chain, resident(chain))[1]) == 3 * 2 * layers - 3


def test_gradients_that_pile_up_evenly_leave_rows_equal() -> None:
    option = ChainOption(2.0, 2, 3, 4)
    piled = [ChainBlock(1, 1, 7 * (60 - b), (option,), (option,), 1.0, 2) for b in range(61)]
    table, apart = RkRotor(piled, 900, 1), _equal_subproblems(piled, resident(piled))[1]
    assert len(apart) == 61 * 62 // 2
    assert len(table._opt) < 2 * 61, "one row for each length, ending before the last block or with it"
    with mock.patch.object(rk_rotor, "SUB_PROBLEMS_AT_ONCE", 10**6):
        plain = RkRotor(piled, 900, 1)
    assert [table.time_s(m) for m in range(901)] == [plain.time_s(m) for m in range(901)]
    for memory in (table.smallest_slots() or 0, 600, 900):
        assert peak_of(piled, table.sequence(memory)) <= memory
