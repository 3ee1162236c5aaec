"""No plan for several ranks is slower than what ZeRO, Elixir and the exact choice make of groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.solve.collectives.group_race import GroupRace
from stowage.stages.solve.proposal import Task
from stowage.stages.solve.referee import Referee
from tests.matrix import examples, some
from tests.solve.collectives.rank_steps import Rates, Step

RATES = st.sampled_from([1e8, 1e9, 1e10])


@pytest.mark.long
@given(
    machine=st.sampled_from([("gpt2", 2, 1e8), ("llama", 4, 1e9)]),
    rates=st.builds(Rates, RATES, RATES, st.booleans()),
    share=st.floats(0, 1.1),
)
@settings(max_examples=examples(3), deadline=None, derandomize=True)
def test_no_choice_for_groups_is_faster_than_the_plan(
    machine: tuple[str, int, float], rates: Rates, share: float
) -> None:
    step = Step(*machine, rates)
    least, most = step.peaks()
    step.is_never_slower(int(least + share * (most - least)))


@pytest.mark.parametrize(
    ("family", "ranks", "rate"), some([("gpt2", 2, 1e8), ("llama", 4, 1e9)], keep=[("gpt2", 2, 1e8)])
)
def test_choices_that_fit_are_met_on_two_real_traces(family: str, ranks: int, rate: float) -> None:
    step = Step(family, ranks, rate, Rates(1e9, 1e9))
    least, most = step.peaks()
    assert all(step.is_never_slower(int(least + share * (most - least))) for share in (0.0, 0.6))


def test_the_table_of_groups_has_the_sizes_and_times_of_the_program() -> None:
    step = Step("llama", 4, 1e9, Rates(1e9, 1e9))
    table, program = step.table(1 << 40), step.program
    parameters = [s for s in program.storages if s.role == "parameter"]
    assert frozenset().union(*table.members) == {s.storage for s in parameters}
    groups, machine = table.problem.groups, table.problem.machine
    assert machine.ranks == 4
    assert sum(g.elements for g in groups) == 4 * sum(s.nbytes for s in parameters)
    assert {g.state_bytes for g in groups} == {2}  # two states as wide as the weights
    computing = sum(step.offloader.program.nodes[e.node].time_s for e in step.offloader.leanest())
    others = sum(
        n.time_s
        for e in step.offloader.leanest()
        if (n := step.offloader.program.nodes[e.node]).collective or n.phase == "update"
    )
    assert sum(g.forward_s + g.backward_s for g in groups) == pytest.approx(computing - others)
    gathers = [n for n in step.offloader.program.nodes if n.node in table.gathers]
    assert sum(machine.collective_s(sum(program.nbytes[s] for s in n.creates)) for n in gathers) == pytest.approx(
        sum(n.time_s for n in gathers)
    )


def test_zero_1_with_states_in_the_host_scatters_when_all_gradients_are_whole() -> None:
    step = Step("gpt2", 2, 1e8, Rates(1e9, 1e9))
    nodes = step.program.nodes
    task = Task(step.offloader.program, step.chain, step.request(1 << 50))
    raced = {p.method: p for p in Referee(step.program, 1 << 50).listen(GroupRace(step.offloader).propose(task))}
    first, second = raced["groups, ZeRO-1 offloaded"], raced["groups, ZeRO-2 offloaded"]
    ran = [nodes[s.node] for s in first.steps if s.kind == "compute"]
    scatters = [i for i, n in enumerate(ran) if n.collective and n.phase == "update"]
    assert scatters
    assert min(scatters) > max(i for i, n in enumerate(ran) if n.phase == "backward")
    updated = {s.storage for s in first.steps if s.kind == "update"}
    assert updated == {s.storage for s in second.steps if s.kind == "update"}
    assert updated
    assert first.outcome.offload_bytes == second.outcome.offload_bytes
    assert first.baseline
