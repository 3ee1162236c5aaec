"""Cuts find mixtures by themselves: where layers want different rewrites, one that no pure way can be as fast as."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from stowage.stages.ir.plan import Option
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition import make_blocks
from stowage.stages.rewrite import Way, variants_of
from stowage.stages.simulate.plan import replay_plan
from stowage.stages.solve import PlanRequest, Solved, Variant, eager_peak_bytes, solve_plan
from stowage.stages.solve.cuts.mixed_way import MixedWay
from stowage.stages.solve.cuts.naming import NamedWay
from stowage.stages.solve.cuts.proven import Planned, proven
from stowage.stages.solve.cuts.union import Union
from stowage.stages.solve.cuts.way import CutWay
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.solve.prepared import light_options
from tests.solve.synthetic_steps import costs_for

PLENTY_S = 30.0

ROWS = 256
NARROW, WIDE = 32, 64


@dataclass(frozen=True)
class TwoKinds:
    """A step with layers of two widths, as it is and with packed masks, and what planners need of it."""

    variants: tuple[Variant, Variant]
    options: list[Option]
    trace: TraceTables

    def budget(self, percent: int) -> int:
        """What is always there, and so much of plain PyTorch's activations."""
        fixed = sum(s.nbytes for s in self.trace.storages if s.role != "temporary")
        return fixed + (eager_peak_bytes(self.trace, self.variants[0].nodes) - fixed) * percent // 100

    def plan(self, variant: Variant, budget: int) -> Solved:
        """The plan of one way alone."""
        own = [o for o in self.options if o.block_hash in {b.block_hash for b in variant.blocks}]
        return solve_plan(variant.trace, variant.nodes, variant.blocks, own, PlanRequest(budget, slots=100))


@cache
def two_kinds() -> TwoKinds:
    """Packing a mask is cheap in wide layers, whose draws are dear; in narrow ones it is the other way round."""
    torch.manual_seed(0)
    widths = (NARROW, NARROW, NARROW, NARROW, WIDE, WIDE, WIDE)
    layers = pairwise(widths)
    model = nn.Sequential(*(m for a, b in layers for m in (nn.Linear(a, b), nn.Tanh(), nn.Dropout(0.3))))
    batch = torch.linspace(-1, 1, ROWS * NARROW).reshape(ROWS, NARROW)
    adam = torch.optim.Adam(model.parameters())
    traces = variants_of(trace_step(model, batch, loss=lambda out, _: (out**2).mean(), optimizer=adam))
    costs = {k: c for each in traces.values() for k, c in costs_for(each).items()}
    recorded = {call.signature for call in traces["plain"].calls}
    for call in traces["packed"].calls:
        wide = {traces["packed"].values[v].shape for v in call.reads} == {(ROWS, WIDE)}
        if call.is_random:
            costs[call.signature] = replace(costs[call.signature], time_s=1e-3 if wide else 1e-6)
        elif call.signature not in recorded:
            costs[call.signature] = replace(costs[call.signature], time_s=1e-6 if wide else 3e-4)
    plain, packed = (Variant(name, traces[name], *make_blocks(traces[name], costs)) for name in ("plain", "packed"))
    options = {(o.block_hash, o.option): o for v in (plain, packed) for o in light_options(v.blocks, levels=8)}
    return TwoKinds((plain, packed), list(options.values()), traces["plain"])


@pytest.mark.parametrize("percent", some([60, 70, 80], keep=[80]))
def test_a_mixture_that_is_faster_than_is_proven_of_either_way(percent: int) -> None:
    """It packs masks in wide layers alone; nobody told that there are mixtures."""
    step = two_kinds()
    budget = step.budget(percent)
    plans = [(v, step.plan(v, budget)) for v in step.variants]
    pure_s = []
    for variant, plan in plans:
        way = CutWay(variant, program_of(variant.trace, variant.nodes), plan.rows, budget)
        list(way.improve(time.monotonic() + PLENTY_S))
        pure_s.append(way.bound_s)
    guide, best = min(plans, key=lambda pair: pair[1].summary.step_time_s)
    named = [NamedWay(v) for v in step.variants]
    union = Union.of(named)
    assert union is not None
    mixed = MixedWay(union, named, guide, best.rows, budget, best.summary.step_time_s)
    list(mixed.improve(time.monotonic() + PLENTY_S))
    assert mixed.found is not None
    assert mixed.found.way.name not in {v.name for v in step.variants}
    assert mixed.fastest_s < min(pure_s)
    assert mixed.bound_s <= mixed.fastest_s
    judged = mixed.found.judged(budget)
    assert judged.peak_bytes <= budget
    assert judged.time_s == pytest.approx(mixed.fastest_s)


def test_the_mixture_is_the_plan() -> None:
    """What proves plans returns it beside those of the pure ways, and the referee accepts its rows."""
    step = two_kinds()
    budget = step.budget(60)
    plans = [Planned(v, step.plan(v, budget)) for v in step.variants]
    allowed = list[Way]()

    def noted(way: Way) -> bool:
        allowed.append(way)
        return True

    found = proven(plans, [], PlanRequest(budget, slots=100, cut_seconds=PLENTY_S), noted)
    best = min(found, key=lambda plan: plan.summary.step_time_s)
    assert best.summary.variant not in {"plain", "packed"}
    assert best.summary.step_time_s < min(p.plan.summary.step_time_s for p in plans if p.plan is not None)
    way = next(w for w in allowed if w.name == best.summary.variant)
    rows = [Step.of(row) for row in best.rows]
    keep = program_of(way.trace, way.nodes).keep
    outcome = replay_plan(way.trace.storages, way.nodes, rows, keep=keep, budget_bytes=budget)
    assert outcome.time_s == best.summary.step_time_s
