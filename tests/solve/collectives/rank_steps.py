"""Sharded steps of small models on a machine that is made up, and what their plans are judged with."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

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
from stowage.stages.solve.collectives.group_table import GroupTable, table_of
from stowage.stages.solve.collectives.groupings import by_block
from stowage.stages.solve.collectives.groups import lowered
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.proposal import JudgedPlan, Task
from stowage.stages.solve.referee import Referee
from stowage.stages.trace import MicroBatch, record_step, with_updates
from stowage.stages.workload import build_workload

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
        return table_of(self.offloader, self.offloader.leanest(), by_block(self.offloader.program), budget)

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
