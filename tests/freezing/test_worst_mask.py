"""The worst mask is exact: against every mask of small systems, and against what the referee finds in plans."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.freezing.coverage import by_first_unit, quick_bound, solved_coverage
from stowage.stages.formulations.freezing.worst_mask import worst_mask
from stowage.stages.freezing.guards import guards_of
from stowage.stages.freezing.levels import levels_of
from stowage.stages.freezing.projection import Guarded
from stowage.stages.freezing.times import chance, mean_times
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.masked_bytes import MaskedBytes
from stowage.stages.ir.step import Step
from stowage.stages.ir.units import ALWAYS, bit, mask_of
from stowage.stages.solver.outcome import SolverSettings
from tests.freezing.frozen import masks
from tests.matrix import examples, some
from tests.solve.prepared import Prepared, prepared_zoo

LIMITS = SolverSettings(20.0)


def every_mask(count: int, k: int) -> list[int]:
    return [ALWAYS | sum(map(bit, chosen)) for many in range(k + 1) for chosen in combinations(range(count), many)]


@st.composite
def systems(draw: st.DrawFn) -> tuple[int, int, list[MaskedBytes]]:
    """Guards of any units, and bytes: some negative, as where a sum takes memory over."""
    count = draw(st.integers(1, 6))
    guard = st.one_of(
        st.just(ALWAYS), st.integers(1, 2**count - 1).map(lambda n: 2 * n), st.integers(0, count - 1).map(bit)
    )
    rows = draw(st.lists(st.dictionaries(guard, st.integers(-3, 20), max_size=7), min_size=1, max_size=5))
    return count, draw(st.integers(0, count)), [MaskedBytes(i, row) for i, row in enumerate(rows)]


@example((5, 2, [MaskedBytes(0, {bit(1): 1, bit(1) | bit(4): -1})]))  # of several units, and all below 0
@given(systems())
@settings(max_examples=examples(60), deadline=None)
def test_no_mask_takes_more(system: tuple[int, int, list[MaskedBytes]]) -> None:
    count, k, levels = system
    found = worst_mask(levels, count, k, LIMITS)
    assert found.mask.bit_count() - 1 <= k
    assert found.nbytes == max(level.under(found.mask) for level in levels)
    assert found.nbytes == max(level.under(mask) for mask in every_mask(count, k) for level in levels)
    assert found.bound_bytes == found.nbytes
    hurried = worst_mask(levels, count, k, SolverSettings(time_limit_s=0.0))
    assert hurried.bound_bytes >= found.nbytes, "a solver that ran out of time leaves a bound"


@given(systems())
@settings(max_examples=examples(30), deadline=None)
def test_bounds_hold_and_the_solver_agrees(system: tuple[int, int, list[MaskedBytes]]) -> None:
    count, k, levels = system
    for level in levels[:2]:
        most = max(level.under(mask) for mask in every_mask(count, k))
        assert quick_bound(level.by_guard, k) >= most
        assert by_first_unit(level.by_guard, count, k).bound_bytes >= most
        assert solved_coverage(level.by_guard, count, k, LIMITS).nbytes == most


def test_a_guard_that_no_first_unit_decides_goes_to_the_solver() -> None:
    level = MaskedBytes(0, {ALWAYS: 5, bit(0) | bit(2): 10, bit(1) | bit(3): 10, bit(1) | bit(2): 1, bit(4): 9})
    found = worst_mask([level], 5, 2, LIMITS)
    assert (found.nbytes, found.solved_rows) == (26, 1)


def guarded(prepared: Prepared, kind: str, tight: bool) -> Guarded:
    solved = prepared.smallest() if tight else prepared.solve()
    steps, units = [Step.of(row) for row in solved.rows], units_of(prepared.trace, kind)
    guards = guards_of(prepared.trace, prepared.nodes, steps, units)
    return Guarded(prepared.trace, prepared.nodes, steps, units, guards)


MODELS = ["gpt2", "bert", "vit", "resnet", "llama", "t5", "tied", "lstm", "transformer", "unet"]


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("kind", ["saving", "parameter", "block"])
@pytest.mark.parametrize("name", some(MODELS, keep=["gpt2", "bert", "resnet", "lstm"]))
def test_the_referee_finds_the_bytes_of_every_mask(name: str, kind: str, tight: bool) -> None:
    plan = guarded(prepared_zoo(name), kind, tight)
    levels = levels_of(plan)
    for active in masks(plan.units, 12):
        mask = mask_of(plan.units, active)
        assert plan.under(mask).replay().peak_bytes == max(level.under(mask) for level in levels), active


@pytest.mark.parametrize("name", some(MODELS, keep=["gpt2", "resnet"]))
def test_no_drawn_mask_takes_more_than_the_worst(name: str) -> None:
    plan = guarded(prepared_zoo(name), "saving", tight=False)
    for k in (1, 2, 3):
        worst = worst_mask(levels_of(plan), len(plan.units), k, LIMITS)
        assert plan.under(worst.mask).replay().peak_bytes == worst.nbytes
        for one in range(len(plan.units)):
            others = [bit((one + i * 5) % len(plan.units)) for i in range(k)]
            assert plan.under(ALWAYS | sum(set(others))).replay().peak_bytes <= worst.nbytes


def test_everything_training_is_the_plan_itself() -> None:
    prepared = prepared_zoo("gpt2")
    plan, solved = guarded(prepared, "saving", tight=True), prepared.smallest()
    found = plan.under(mask_of(plan.units, [u.name for u in plan.units])).replay()
    assert (found.peak_bytes, found.time_s) == (solved.summary.device_peak_bytes, solved.summary.step_time_s)


def test_the_mean_time_is_the_mean_over_all_masks() -> None:
    plan = guarded(prepared_zoo("tied"), "parameter", tight=True)
    count, k = len(plan.units), 1
    of_size = [mask for mask in every_mask(count, k) if mask.bit_count() - 1 == k]
    times = [plan.under(mask).replay().time_s for mask in of_size]
    assert mean_times(plan, k)[0] == pytest.approx(sum(times) / len(times))


def test_chances() -> None:
    assert chance(ALWAYS, 10, 0) == 1.0
    assert chance(bit(3), 10, 1) == pytest.approx(0.1)
    assert chance(bit(3) | bit(4), 4, 2) == pytest.approx(1 - 1 / 6)
    assert chance(bit(1), 4, 4) == 1.0
