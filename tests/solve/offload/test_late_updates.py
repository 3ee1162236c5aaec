"""Which updates the CPU takes with clipping: as many as it can do between the norm and the weights' next uses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from stowage.stages.solve.in_memory import OrderMaker, keep_everything
from stowage.stages.solve.offload.belady.late_updates import LateUpdate, in_time, late_updates, sets_of_updates
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Chain, Execution
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.trace import MicroBatch
from tests.offload.with_lower_tier import LOWER_TIER
from tests.runtime.beside_eager import adamw, prepare
from tests.zoo import ZOO


@cache
def clipped(rate: float) -> tuple[Offloader, list[Execution], list[LateUpdate]]:
    """Of a small Llama, with a CPU of that rate."""
    prepared = prepare(ZOO["llama"], adamw, MicroBatch(max_grad_norm=1.0))
    chain = Chain(prepared.blocks, prepared.nodes, prepared.options)
    offloader = Offloader(
        program_of(prepared.trace, prepared.nodes), chain, replace(LOWER_TIER, cpu_update_bytes_per_s=rate)
    )
    executions = keep_everything(OrderMaker(offloader.program, chain, 1 << 60)).executions
    return offloader, executions, late_updates(offloader, executions)


def test_all_that_are_worth_moving_in_the_order_of_forward() -> None:
    offloader, executions, updates = clipped(1e9)
    assert {u.weight for u in updates} == {s for s in offloader.movable if s in _parameters(offloader)}
    assert [u.first_use for u in updates] == sorted(u.first_use for u in updates)
    for update in updates:
        node = offloader.program.nodes[executions[update.first_use].node]
        assert update.weight in node.reads
        assert node.phase == "forward"


def _parameters(offloader: Offloader) -> set[int]:
    return {s.storage for s in offloader.program.storages if s.role == "parameter"}


def test_a_clipped_gradient_is_scaled_first() -> None:
    """Weight and two states read and written, the gradient read once more and written: 3 * 2 + 1 + 2."""
    offloader, _, updates = clipped(1e9)
    for update in updates:
        nbytes = offloader.program.nbytes[update.weight]
        counter_and_scale = 64
        assert update.time_s * 1e9 == pytest.approx(9 * nbytes, abs=counter_and_scale)


def test_without_a_cpu_beside_there_are_none() -> None:
    assert clipped(0.0)[2] == []


def test_a_slower_cpu_takes_less_and_what_forward_uses_last() -> None:
    counts = []
    for rate in (1e8, 3e8, 1e12):
        offloader, executions, updates = clipped(rate)
        sets = sets_of_updates(offloader, executions, updates, 0)
        assert all(taken == tuple(updates[len(updates) - len(taken) :]) for taken in sets)
        assert len(sets[0]) == len(updates), "all, whatever the estimate says"
        counts.append(in_time(offloader, executions, updates, 0))
        assert counts[-1] in map(len, sets)
    assert 0 < counts[0] < counts[1] < counts[2] == len(updates)


def test_memory_for_what_stays_makes_the_window_shorter() -> None:
    """Where the device need not wait for its own weights and states, the CPU has less time."""
    offloader, executions, updates = clipped(3e8)
    scarce, plenty = (in_time(offloader, executions, updates, n) for n in (0, 1 << 40))
    assert plenty < scarce
