"""No plan for several ranks is slower than what ZeRO, Elixir and the exact choice make of groups."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.flows.planning.costed import Costed, cost_traces
from stowage.flows.planning.effort import QUICK
from stowage.stages.formulations.sharding.cost_model import CostModel
from stowage.stages.formulations.sharding.elixir.on_fsdp2 import greedy_choices
from stowage.stages.formulations.sharding.fixed import fixed_policies
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.exposure import exposed
from stowage.stages.ir.machine import Link
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import TraceTables
from stowage.stages.optimizers import KnownOptimizer
from stowage.stages.profile import CostStore, profile_trace
from stowage.stages.solve import LowerTier, PlanRequest, solve_variants
from stowage.stages.solve.collectives.group_race import GroupRace
from stowage.stages.solve.collectives.group_table import GroupTable, groups_by_block, table_of
from stowage.stages.solve.collectives.groups import lowered
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.proposal import JudgedPlan, Task
from stowage.stages.solve.referee import Referee
from stowage.stages.trace import MicroBatch, record_step, with_updates
from stowage.stages.workload import build_workload
from tests.matrix import examples, some

TINY = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 300, "n_positions": 32},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 300,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


@dataclass(frozen=True)
class Rates:
    """Rates of one rank's part of the host."""

    copies: float
    cpu_updates: float
    shared: bool = False


@cache
def trace_of(family: str, ranks: int) -> TraceTables:
    made = build_workload(family, TINY[family], batch_size=2, sequence_length=16, seed=0, fake=True)
    optimizer = KnownOptimizer(torch.optim.AdamW(made.model.parameters()))
    recorded = record_step(made.model, made.batch)
    return with_updates(recorded, made.model, optimizer=optimizer, micro_batch=MicroBatch(ranks=ranks))


@cache
def costed_step(family: str, ranks: int, collectives: float) -> tuple[Costed, list[Option]]:
    """A step on a device, with schedules of its blocks."""
    device = DeviceDescription(
        fingerprint="made-up",
        name="made up",
        type="cuda",
        memory_bytes=1 << 40,
        flops_per_s=1e12,
        memory_copy_bytes_per_s=1e10,
        disk_read_bytes_per_s=1.0,
        disk_write_bytes_per_s=1.0,
        disk_duplex_bytes_per_s=1.0,
        update_bytes_per_s=1e10,
        dispatch_s=1e-9,
        collective_bytes_per_s=collectives,
        collective_s=1e-6,
    )
    trace = trace_of(family, ranks)
    with tempfile.TemporaryDirectory() as folder:
        stores = Path(folder)
        costs = profile_trace(trace, device, CostStore(stores / "costs"), costs="roofline")
        costed = cost_traces({"plain": trace}, costs, trace, device, QUICK.grid.max_exact_nodes)
        return costed, costed.options_for("auto", stores, QUICK)


class Step:
    """A step on a machine, and everything that plans are judged with."""

    def __init__(self, family: str, ranks: int, collectives: float, rates: Rates) -> None:
        self.costed, self.options = costed_step(family, ranks, collectives)
        link = Link(rates.copies, rates.copies, 1.5 * rates.copies, carries_collectives=rates.shared)
        self.tier = LowerTier(link, 1 << 40, smallest_bytes=1024, cpu_update_bytes_per_s=rates.cpu_updates)
        variant = self.costed.variants[0]
        counted = exposed(variant.nodes)
        self.program = program_of(variant.trace, variant.nodes)
        self.chain = Chain(variant.blocks, counted, self.options)
        self.offloader = Offloader(program_of(variant.trace, counted), self.chain, self.tier)

    def request(self, budget: int) -> PlanRequest:
        return PlanRequest(budget, lower_tier=self.tier, o_ilp_searches=0)

    def table(self, budget: int) -> GroupTable:
        return table_of(self.offloader, self.offloader.leanest(), groups_by_block(self.offloader.program), budget)

    def judged(self, budget: int, choices: Sequence[GroupChoice]) -> JudgedPlan:
        """Lower a choice to a plan, hidden as well as the budget allows."""
        plan = lowered(self.offloader, self.offloader.leanest(), self.table(budget).choice(choices), method="by hand")
        return Referee(self.program, budget).judge(replace(plan, hide_at_once=True))

    def peaks(self) -> tuple[int, int]:
        """Return the least and the most bytes of the fixed policies."""
        found = [self.judged(1 << 50, c).peak_bytes for c in fixed_policies(self.table(1 << 40).problem).values()]
        return min(found), max(found)

    def is_never_slower(self, budget: int) -> int:
        """Compare the plan with every choice; return how many of these fit."""
        table, referee = self.table(budget), Referee(self.program, budget)
        choices = list(fixed_policies(table.problem).values())
        leanest = self.judged(budget, choices[-1])
        spare = max(0, leanest.peak_bytes - CostModel(table.problem).device_bytes(choices[-1]))
        greedy = greedy_choices(replace(table.problem, fixed_bytes=spare))
        others = [self.judged(budget, c) for c in [*choices, *([greedy] if greedy else [])]]
        task = Task(self.offloader.program, self.chain, self.request(budget))
        raced = list(referee.listen(GroupRace(self.offloader).propose(task)))
        fitting = [p for p in (*others, *raced) if p.peak_bytes <= budget]
        try:
            solved = solve_variants(self.costed.variants[:1], self.options, self.request(budget))
        except Infeasible:
            assert not fitting
            return 0
        assert solved.summary.device_peak_bytes <= budget
        for plan in fitting:
            assert solved.summary.step_time_s <= plan.time_s, plan.method
        chosen = [p.time_s for p in raced if p.peak_bytes <= budget]
        for plan in others[: len(choices)]:
            if plan.peak_bytes <= budget:
                assert chosen, "a policy that fits is not among the choices"
                assert min(chosen) <= plan.time_s, "the best of the choices is slower than a policy"
        return len(fitting)


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
