"""How many small weights are gathered together is chosen by simulated plans: latency against memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stowage.flows.api.buckets import (
    LEAST_BYTES,
    MOST_BYTES,
    NEAR,
    bucket_sizes,
    largest_block_bytes,
    plan_by_buckets,
)
from stowage.flows.planning.costed import cost_step
from stowage.flows.planning.effort import QUICK
from stowage.flows.planning.job import Planning, StepToPlan
from stowage.flows.planning.planned import Planned
from stowage.flows.planning.step import plan_costed
from stowage.stages.device.rates.collectives import CollectiveRates
from stowage.stages.ir.collectives import GATHER
from stowage.stages.ir.errors import Infeasible, NoRoomInLowerTier
from stowage.stages.trace import MicroBatch
from tests.devices import made_up_cpu
from tests.solve.collectives.test_plans_of_ranks import Layers

RANKS, DEPTH, BYTES_PER_S = 2, 4, 2e9
ROOMY = "1GiB"
RATES: dict[str, Any] = {
    "flops_per_s": 3.5e10,
    "memory_copy_bytes_per_s": 3.5e9,
    "update_bytes_per_s": 1.2e9,
    "dispatch_s": 1.2e-5,
    "collective_bytes_per_s": BYTES_PER_S,
}
"""A processor's, whichever machine this is."""

SHORT_S, LONG_S = 2e-6, 5e-4
"""Times in which a collective begins: less than the transfer of a weight, and as long as that of a megabyte."""

SMALL, LARGE = 128 << 10, 512 << 10
"""Sizes of buckets, which hold a part of a layer and a whole one."""


@dataclass
class Trials:
    """Plans a stack of layers by tables for two ranks whose collectives take `start_s` to begin.

    Attributes:
        times_s: the simulated time of each plan by the size of its buckets; None where there is none.
        bounds_s: the lower bounds of these times.
        least_bytes: of the sizes for which there is no plan, the smallest budget with one.
    """

    stores: Path
    start_s: float
    budget: str | int
    times_s: dict[int, float | None] = field(default_factory=dict)
    bounds_s: dict[int, float] = field(default_factory=dict)
    least_bytes: dict[int, int] = field(default_factory=dict)

    def __call__(self, micro_batch: MicroBatch) -> Planned:
        model = Layers(DEPTH, 128)
        step = StepToPlan(
            model=model,
            batch=(torch.randn(64, 128),),
            loss=lambda out, batch: out,
            optimizer=torch.optim.AdamW(model.parameters()),
            micro_batch=micro_batch,
        )
        target = made_up_cpu(collective_s=self.start_s, **RATES)
        size = micro_batch.bucket_bytes
        try:
            costed = cost_step(step, Planning(stores=self.stores, costs="roofline", target=target))
            found = plan_costed(costed, self.budget, Planning(stores=self.stores, effort=QUICK))
        except Infeasible as error:
            self.times_s[size], self.least_bytes[size] = None, error.smallest_feasible_bytes
            raise
        self.times_s[size], self.bounds_s[size] = found.summary.step_time_s, found.summary.lower_bound_s
        return found

    def choose(self, *sizes: int) -> tuple[Planned, int]:
        return plan_by_buckets(self, MicroBatch(ranks=RANKS), list(sizes))


def gathers(plan: Planned) -> int:
    return sum(call.target == GATHER for call in plan.trace.calls)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


def test_collectives_that_take_long_to_begin_get_larger_buckets(stores: Path) -> None:
    """Fewer gathers then make up for waiting for whole layers; where they begin at once, a layer in parts is faster."""
    for start_s, best in ((SHORT_S, SMALL), (LONG_S, LARGE)):
        for sizes in ((SMALL, LARGE), (LARGE, SMALL)):
            trials = Trials(stores, start_s, ROOMY)
            plan, size = trials.choose(*sizes)
            assert size == best
            assert plan.summary.step_time_s == min(t for t in trials.times_s.values() if t is not None)
            assert list(trials.times_s) == list(sizes), "no plan was near enough to its bound to end the search"
            assert gathers(plan) == (DEPTH if best == LARGE else 4 * DEPTH)


def test_where_whole_layers_do_not_fit_buckets_are_smaller(stores: Path) -> None:
    """Also where collectives take long to begin: memory is a limit, and time is not."""
    least = {}
    for size in (SMALL, LARGE):
        trials = Trials(stores, LONG_S, "1KiB")
        with pytest.raises(Infeasible):
            trials.choose(size)
        least |= trials.least_bytes
    assert least[SMALL] < least[LARGE]
    between = (least[SMALL] + least[LARGE]) // 2
    trials = Trials(stores, LONG_S, between)
    plan, size = trials.choose(LARGE, SMALL)
    assert size == SMALL
    assert trials.times_s[LARGE] is None
    assert plan.summary.device_peak_bytes <= between
    with pytest.raises(Infeasible) as refused:
        Trials(stores, LONG_S, "1KiB").choose(LARGE, SMALL)
    assert refused.value.smallest_feasible_bytes == least[SMALL]


def test_a_plan_near_its_bound_ends_the_search() -> None:
    """The sizes after it could gain next to nothing, and planning takes time."""

    def planned(time_s: float) -> Planned:
        summary = SUMMARY(step_time_s=time_s, lower_bound_s=1.0)
        return PLANNED(summary)  # type: ignore[return-value]

    times = {1: 2.0, 2: NEAR, 3: 1.0}
    tried = []

    def plan(micro_batch: MicroBatch) -> Planned:
        tried.append(micro_batch.bucket_bytes)
        return planned(times[micro_batch.bucket_bytes])

    found, size = plan_by_buckets(plan, MicroBatch(ranks=RANKS), [1, 2, 3])
    assert (size, found.summary.step_time_s, tried) == (2, NEAR, [1, 2])


@dataclass
class SUMMARY:
    step_time_s: float
    lower_bound_s: float


@dataclass
class PLANNED:
    summary: SUMMARY


def sizes(start_s: float, block_bytes: int = 1 << 40, ranks: int = RANKS) -> list[int]:
    return bucket_sizes(CollectiveRates(BYTES_PER_S, start_s), ranks, block_bytes)


def test_sizes_that_are_tried_grow_with_the_time_in_which_a_collective_begins() -> None:
    found = [sizes(start_s) for start_s in (0.0, 1e-5, 1e-4, 1e-3, 1.0)]
    assert found == sorted(found)
    assert found[0] == [LEAST_BYTES]
    assert found[2] == [2 << 20, 512 << 10]
    assert found[-1] == [MOST_BYTES, MOST_BYTES // 4]
    assert all(LEAST_BYTES <= size <= MOST_BYTES for each in found for size in each)


def test_no_size_is_tried_that_gives_the_same_buckets_as_another() -> None:
    """A bucket holds weights of one block, so that all sizes from a block's on are alike."""
    block = largest_block_bytes(Layers(DEPTH, 128))
    assert block == 4 * (2 * 128 * 256 + 256 + 3 * 128)
    assert sizes(1e-3, block) == [LARGE, SMALL]
    assert sizes(2e-5, block) == [LARGE, SMALL]
    assert sizes(1e-3, 1000) == [LEAST_BYTES]


def test_another_size_is_tried_where_there_is_no_room_to_offload() -> None:
    """A failure for want of room below is one like any other: plans of other buckets may need none."""
    fits: Any = SimpleNamespace(summary=SimpleNamespace(step_time_s=1.0, lower_bound_s=1.0))

    def plan(micro_batch: MicroBatch) -> Planned:
        if micro_batch.bucket_bytes == LARGE:
            raise NoRoomInLowerTier("no room", 40, 7)
        planned: Planned = fits
        return planned

    assert plan_by_buckets(plan, MicroBatch(ranks=2), [LARGE, SMALL]) == (fits, SMALL)
    with pytest.raises(NoRoomInLowerTier):
        plan_by_buckets(plan, MicroBatch(ranks=2), [LARGE])
