"""Repairs of orders that exceed the budget: legal, within the budget, and no slower than was allowed."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.eviction.rule import RULES
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import Storage, TraceTables
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.evicting import Evicting
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.program.relief import Relief
from tests.matrix import examples
from tests.solve.judged import replayed
from tests.solve.prepared import prepare_trace
from tests.solve.synthetic_steps import training_steps


def _node(
    number: int, reads: tuple[int, ...], phase: Literal["forward", "backward"], time_s: float = 1.0
) -> ComputeNode:
    return ComputeNode(
        node=number,
        calls=(number,),
        reads=reads,
        creates=(number,),
        mutates=(),
        phase=phase,
        block=0,
        once=False,
        random=False,
        time_s=time_s,
        workspace_bytes=0,
        estimated=False,
        name=f"n{number}",
    )


def _chain(length: int, nbytes: int = 10, dear: int = -1) -> StepProgram:
    """A chain whose backward reads every value of forward, the last first; one value takes long to make."""
    forward = [_node(k, (k - 1,) if k else (), "forward", 50.0 if k == dear else 1.0) for k in range(length)]
    backward = [
        _node(length + k, (length - 1 - k, *((length + k - 1,) if k else ())), "backward") for k in range(length)
    ]
    sizes = [nbytes] * length + [1] * length
    storages = [Storage(s, size, "temporary", f"s{s}") for s, size in enumerate(sizes)]
    return StepProgram(storages, [*forward, *backward], frozenset({2 * length - 1}))


def _all(program: StepProgram) -> list[Execution]:
    return [Execution(n.node, "") for n in program.nodes]


def test_of_a_chain_what_is_cheap_is_made_again_and_what_is_dear_stays() -> None:
    program = _chain(6, dear=2)
    order = _all(program)
    peak = program.peak_bytes(order)
    found = Relief(program).relieved(order, peak - 10, 1e9)
    assert found is not None
    assert program.peak_bytes(found) <= peak - 10
    assert [e.node for e in found].count(2) == 1
    assert len(found) == len(order) + 1


def test_parts_of_a_long_chain_are_dropped_at_once() -> None:
    """Of 64 values 50 fit: others are made again from checkpoints, and each repair drops several."""
    program = _chain(64)
    order = _all(program)
    budget = program.peak_bytes(order) - 140
    found = Relief(program).relieved(order, budget, 1e9)
    assert found is not None
    assert program.peak_bytes(found) <= budget
    assert len(found) <= len(order) + 2 * 14


def test_what_fits_is_left_as_it_is() -> None:
    program = _chain(4)
    order = _all(program)
    assert Relief(program).relieved(order, program.peak_bytes(order), 0.0) == order


def test_it_gives_up_where_that_would_take_too_long_or_is_far_off() -> None:
    program = _chain(6)
    order = _all(program)
    peak = program.peak_bytes(order)
    assert Relief(program).relieved(order, peak - 10, 0.5) is None
    assert Relief(program).relieved(order, peak - 10, 1e9, until_s=0.0) is None
    assert Relief(program).relieved(order, 21, 1e9) is None, "far more than a little above the budget"


def test_runs_move_to_where_there_is_room() -> None:
    """A large value that is made early and read late is made late instead, which costs nothing."""
    nodes = [
        _node(0, (), "forward"),
        _node(1, (), "forward"),
        _node(2, (0,), "forward"),
        _node(3, (2,), "forward"),
        _node(4, (1, 3), "forward"),
    ]
    sizes = [5, 50, 20, 1, 1]
    program = StepProgram(
        [Storage(s, size, "temporary", f"s{s}") for s, size in enumerate(sizes)], nodes, frozenset({4})
    )
    order = _all(program)
    assert program.peak_bytes(order) == 75
    found = Relief(program).relieved(order, 74, 0.0)
    assert found is not None
    assert sorted(e.node for e in found) == [0, 1, 2, 3, 4]
    assert program.peak_bytes(found) <= 74


@settings(max_examples=examples(300), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(training_steps(), st.floats(0, 1), st.sampled_from([0.05, 0.2, 10.0]), st.booleans())
def test_repaired_orders_are_legal_and_fit(trace: TraceTables, share: float, allowed: float, evicted: bool) -> None:
    """From the order that keeps everything, and from what greedy eviction finds within a little more memory."""
    prepared = prepare_trace(trace)
    program = program_of(trace, prepared.nodes)
    evicting = Evicting(program)
    least = evicting.leanest(len(RULES))
    assume(least is not None)
    assert least is not None
    order = _all(program)
    high = program.peak_bytes(order)
    if evicted:
        within = (least.peak_bytes + high) // 2
        order = next((o.executions for o in evicting.orders(within, len(RULES))), order)
    peak = program.peak_bytes(order)
    budget = int(least.peak_bytes + share * (peak - least.peak_bytes))
    before = replayed(program, order)
    most_s = allowed * before.time_s
    found = Relief(program).relieved(order, budget, most_s)
    if found is not None:
        after = replayed(program, found)
        assert after.peak_bytes <= budget
        assert after.time_s <= before.time_s + most_s * (1 + 1e-9)
        assert after.peak_bytes == program.peak_bytes(found)


def test_most_small_excesses_are_repaired() -> None:
    """The property above is no empty one."""
    repaired = 0
    for length in range(3, 13):
        program = _chain(length)
        order = _all(program)
        found = Relief(program).relieved(order, program.peak_bytes(order) - 10, 1e9)
        repaired += found is not None and replayed(program, found).time_s == pytest.approx(2.0 * length + 1)
    assert repaired >= 8
