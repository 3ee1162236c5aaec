"""Executions to plans: peaks equal the referee's, and retaining instead of recomputing only ever helps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.chain.rk_rotor import RkRotor
from stowage.stages.ir.trace import TraceTables
from stowage.stages.solve.program.chain import Chain, Execution
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.program.program import StepProgram
from tests.matrix import examples
from tests.simulate.small_plans import KEEP, NODES, STORAGES, node, storage
from tests.solve.judged import replayed
from tests.solve.prepared import prepare_trace, prepared_zoo
from tests.solve.synthetic_steps import training_steps

QUICK = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def runs(*nodes: int) -> list[Execution]:
    return [Execution(n, f"row {i}") for i, n in enumerate(nodes)]


def leanest(trace: TraceTables) -> tuple[StepProgram, list[Execution]]:
    """RK-Rotor's sequence for the fewest slots."""
    prepared = prepare_trace(trace)
    chain = Chain(prepared.blocks, prepared.nodes, prepared.options)
    nominal = 2 * sum(s.nbytes + 1 for s in trace.storages)  # sizes are rounded up to slots
    table = RkRotor(chain.chain_blocks, 120, max(1, nominal // 120))
    least = table.smallest_slots()
    assert least is not None
    program = program_of(trace, prepared.nodes)
    return program, program.without_dead(chain.executions(table.sequence(least)))


def test_everything_is_freed_after_its_last_use() -> None:
    program = StepProgram(STORAGES, NODES, KEEP)
    steps = program.steps(runs(0, 1, 2, 3, 4))
    assert [(s.node, s.storage) for s in steps] == [
        (0, -1), (1, -1), (2, -1), (3, -1), (-1, 1), (-1, 2), (4, -1), (-1, 4),
    ]  # fmt: skip


def test_copies_are_freed_one_by_one() -> None:
    program = StepProgram(STORAGES, NODES, KEEP)
    steps = [s.node if s.node >= 0 else f"-{s.storage}" for s in program.steps(runs(0, 1, 2, 1, 3, 4))]
    assert steps == [0, 1, 2, "-2", 1, 3, "-1", "-2", 4, "-4"]


def test_dead_repetitions_go_and_first_executions_stay() -> None:
    program = StepProgram(STORAGES, NODES, KEEP)
    assert program.without_dead(runs(0, 1, 2, 1, 3, 4)) == runs(0, 1, 2, 1, 3, 4)
    kept = program.without_dead(runs(0, 1, 2, 3, 1, 4))
    assert [e.node for e in kept] == [0, 1, 2, 3, 4]


def test_retaining_by_hand() -> None:
    program = StepProgram(STORAGES, NODES, KEEP)
    executions = runs(0, 1, 2, 1, 3, 4)
    # Node 3 needs 2031 bytes either way; the update's 2501 bind, and hold neither copy.
    assert program.peak_bytes(executions) == 2501
    assert [e.node for e in program.retain_where_possible(executions, 2501)] == [0, 1, 2, 3, 4]


@st.composite
def repeated(draw: st.DrawFn) -> tuple[StepProgram, list[Execution]]:
    """Nodes that make two storages each, run again and again between others that read one or the other."""
    count = draw(st.integers(2, 5))
    sizes = st.integers(1, 50)
    storages = [storage(i, draw(sizes)) for i in range(2 * count)]
    nodes = []
    for i in range(count):
        reads = draw(st.sets(st.integers(0, 2 * i - 1), max_size=2)) if i else set()
        nodes.append(node(i, sorted(reads), [2 * i, 2 * i + 1], time_s=float(draw(sizes))))
    order = list(range(count))
    for _ in range(draw(st.integers(2, 6))):
        order += draw(st.lists(st.integers(0, count - 1), max_size=4))
        reads = draw(st.sets(st.integers(0, 2 * count - 1), min_size=1, max_size=2))
        takes = sorted(reads)[:1] if draw(st.booleans()) else []
        storages.append(storage(len(storages), storages[takes[0]].nbytes if takes else draw(sizes)))
        nodes.append(node(len(nodes), sorted(reads), [storages[-1].storage], phase="backward", takes=tuple(takes)))
        order.append(nodes[-1].node)
    program = StepProgram(storages, nodes, frozenset({storages[-1].storage}))
    return program, program.without_dead(runs(*order))


@settings(max_examples=examples(400), **QUICK)
@given(repeated(), st.floats(0, 0.6))
def test_removing_several_repetitions_of_a_node_keeps_the_budget(
    found: tuple[StepProgram, list[Execution]], share: float
) -> None:
    program, executions = found
    assert program.peak_bytes(executions) == replayed(program, executions).peak_bytes
    budget = int(program.peak_bytes(executions) * (1 + share))
    retained = program.retain_where_possible(executions, budget)
    assert replayed(program, retained).peak_bytes <= budget
    assert program.without_dead(retained) == retained
    once = program.retain_where_possible(executions, 1 << 50)
    assert len(once) == len(program.nodes)


@settings(max_examples=examples(60), **QUICK)
@given(training_steps(), st.floats(0, 1))
def test_peaks_are_the_referees_and_retaining_only_helps(trace: TraceTables, share: float) -> None:
    program, executions = leanest(trace)
    outcome = replayed(program, executions)
    assert program.peak_bytes(executions) == outcome.peak_bytes
    budget = int(outcome.peak_bytes * (1 + 0.5 * share))
    retained = program.retain_where_possible(executions, budget)
    after = replayed(program, retained)
    assert after.peak_bytes == program.peak_bytes(retained) <= budget
    assert after.time_s <= outcome.time_s + 1e-12
    everything = program.retain_where_possible(executions, 1 << 50)
    assert replayed(program, everything).time_s == pytest.approx(outcome.once_time_s)


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "batchnorm"])
def test_peaks_are_the_referees_on_models(name: str) -> None:
    prepared = prepared_zoo(name)
    program, executions = leanest(prepared.trace)
    outcome = replayed(program, executions)
    assert outcome.time_s > outcome.once_time_s
    for budget in (outcome.peak_bytes, int(outcome.peak_bytes * 1.1)):
        retained = program.retain_where_possible(executions, budget)
        found = replayed(program, retained)
        assert program.peak_bytes(retained) == found.peak_bytes <= budget
