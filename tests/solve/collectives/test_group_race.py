"""No plan for several ranks is slower than what ZeRO, Elixir and the exact choice make of groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
