"""No plan of any rewrite, or of any mixture of rewrites, is faster than the bound of all of them together."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.machine import Link
from stowage.stages.ir.methods import METHODS
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.partition import make_blocks, make_variants
from stowage.stages.report.facts import bound_words
from stowage.stages.rewrite import Way, exchangeable, mixed, variants_of
from stowage.stages.solve import LowerTier, PlanRequest, Solved, Variant, eager_peak_bytes, solve_plan, solve_variants
from stowage.stages.solve.cuts.mixed_way import MixedWay
from stowage.stages.solve.cuts.naming import NamedWay
from stowage.stages.solve.cuts.union import Union
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.solve.cuts.unclamped import bounds_as_proven
from tests.solve.prepared import light_options
from tests.solve.synthetic_steps import costs_for

SAME = 1 + 1e-12
"""The same times may be added up in another order."""

ALONE = [m.name for m in METHODS if not m.offloads and not m.whole]


def layers() -> TraceTables:
    """Layers whose masks weigh as much as their activations."""
    torch.manual_seed(0)
    stack = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.3))]
    batch = torch.linspace(-1, 1, 256 * 32).reshape(256, 32)
    model = nn.Sequential(*stack)
    return trace_step(model, batch, loss=lambda out, _: (out**2).mean(), optimizer=torch.optim.Adam(model.parameters()))


def gpt2() -> TraceTables:
    """Three dropouts a layer, one of them on the attention's weights, whose masks are large."""
    torch.manual_seed(0)
    shape = {"n_layer": 4, "n_embd": 64, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, attn_implementation="eager")).train()
    ids = torch.arange(128).reshape(2, 64) % 64
    return trace_step(model, {"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW(model.parameters()))


MODELS = {"layers": layers, "gpt2": gpt2}


@cache
def variants_for(name: str, dear: bool) -> tuple[list[Variant], list[Option], int, int]:
    """The variants of a model with schedules of their blocks, what is always there, and plain PyTorch's peak.

    Where draws of attention's masks are dear, it is worth packing these masks and no others.
    """
    trace = MODELS[name]()
    found: list[Variant] = []
    costs: dict[str, Cost] = {k: c for each in variants_of(trace).values() for k, c in costs_for(each).items()}
    for each in variants_of(trace).values() if dear else ():
        for call in each.calls:
            if call.is_random and {len(each.values[v].shape) for v in call.reads} == {4}:
                costs[call.signature] = replace(costs[call.signature], time_s=1e-3)
    for variant, each in variants_of(trace).items():
        nodes, blocks = make_blocks(each, costs)
        found.append(Variant(variant, each, nodes, blocks))
    options = {(o.block_hash, o.option): o for v in found for o in light_options(v.blocks, levels=8)}
    fixed = sum(s.nbytes for s in trace.storages if s.role != "temporary")
    return found, list(options.values()), fixed, eager_peak_bytes(trace, found[0].nodes)


def mixtures_of(ways: Sequence[Way], count: int) -> Iterator[Way]:
    draw = random.Random(5)
    blocks = exchangeable(*ways)
    assert blocks
    for _ in range(count):
        taken = [draw.randrange(2) if b in blocks else 0 for b in range(len(ways[0].blocks))]
        found = mixed(ways, taken)
        assert found is not None
        yield found


def plans_of(way: Way, options: Sequence[Option], budget: int, methods: Sequence[str]) -> Iterator[Solved]:
    own = [o for o in options if o.block_hash in {b.block_hash for b in way.blocks}]
    for method in methods:
        try:
            yield solve_plan(way.trace, way.nodes, way.blocks, own, PlanRequest(budget, method=method, slots=100))
        except (Infeasible, ParameterError):
            continue


@pytest.mark.parametrize("name", MODELS)
def test_every_mixture_is_in_the_union(name: str) -> None:
    """Each of its nodes is known, and takes no less time than there."""
    variants = variants_for(name, False)[0]
    union = Union.of([NamedWay(v) for v in variants])
    assert union is not None
    assert 0 < len(union.graph.optional) < len(union.graph.nodes) / 2
    assert union.graph.once_s <= min(sum(n.time_s for n in v.nodes) for v in variants) * SAME
    for way in [*variants, *mixtures_of(variants, 4)]:
        numbers = union.numbers_of(NamedWay(way))
        assert -1 not in numbers
        assert all(union.graph.nodes[k].time_s <= n.time_s for k, n in zip(numbers, way.nodes, strict=True))
        assert set(range(len(union.graph.nodes))) - union.graph.optional <= set(numbers)
        assert all(not family.isdisjoint(numbers) for family in union.graph.families)
        assert union.graph.once_s <= sum(n.time_s for n in way.nodes) * SAME


class Skips(nn.Module):
    """Layers with masks, whose second half reads what the first has made, the last first."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(nn.Linear(32, 32) for _ in range(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = torch.dropout(torch.tanh(layer(x)), 0.3, True)
            kept.append(x)
        for layer in self.up:
            x = torch.dropout(torch.tanh(layer(x + kept.pop())), 0.3, True)
        return x


def test_what_no_mixture_can_lose_is_made_where_chains_are_cut_differently_too() -> None:
    """Rewrites are cut alike in one chain; around long-lived values each in its own way, so that none are mixed."""
    model = Skips()
    batch = torch.linspace(-1, 1, 256 * 32).reshape(256, 32)
    adam = torch.optim.Adam(model.parameters())
    traces = variants_of(trace_step(model, batch, loss=lambda out, _: (out**2).mean(), optimizer=adam))
    costs = {k: c for each in traces.values() for k, c in costs_for(each).items()}
    made = make_variants(traces, costs, max_exact_nodes=6)
    variants = [
        Variant(VariantName(rewrite, chain).text, traces[rewrite], found.nodes, found.blocks)
        for rewrite, chains in made.items()
        for chain, found in chains.items()
    ]
    pure = {v.name: v for v in variants}
    assert not exchangeable(pure["plain+long_lived"], pure["packed+long_lived"])
    union = Union.of([NamedWay(v) for v in variants])
    assert union is not None
    assert 0 < len(union.graph.optional) < len(union.graph.nodes) / 3
    for way in [*variants, *mixtures_of([pure["plain"], pure["packed"]], 4)]:
        numbers = union.numbers_of(NamedWay(way))
        assert set(range(len(union.graph.nodes))) - union.graph.optional <= set(numbers)
        assert all(not family.isdisjoint(numbers) for family in union.graph.families)


@pytest.mark.parametrize("dear", some([False, True], keep=[True]), ids=["cheap draws", "dear draws"])
@pytest.mark.parametrize("name", MODELS)
def test_no_plan_of_any_mixture_beats_the_bound(name: str, dear: bool) -> None:
    """Each whole rewrite by every method, and mixtures that were drawn, at several budgets."""
    variants, options, fixed, eager = variants_for(name, dear)
    above_once = 0
    for percent in (28, 45):
        budget = fixed + (eager - fixed) * percent // 100
        plans = [(v, plan) for v in variants for plan in plans_of(v, options, budget, ALONE)]
        plans += [(w, plan) for w in mixtures_of(variants, 3) for plan in plans_of(w, options, budget, ["auto"])]
        if not plans:
            continue
        guide, best = min(plans, key=lambda pair: pair[1].summary.step_time_s)
        named = [NamedWay(v) for v in variants]
        union = Union.of(named)
        assert union is not None
        way = MixedWay(union, named, guide, best.rows, budget, best.summary.step_time_s)
        for _ in way.improve(time.monotonic() + 5):
            assert all(plan.summary.step_time_s * SAME >= way.bound_s for _, plan in plans)
        above_once += bool(way.cuts)
        assert way.fastest_s <= best.summary.step_time_s * SAME
    assert above_once


def test_cuts_at_what_a_mixture_computes_otherwise_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no node of what an answer describes is known, the bound holds all the same."""
    variants, options, fixed, eager = variants_for("gpt2", True)
    budget = fixed + (eager - fixed) * 45 // 100
    plans = [(v, plan) for v in variants for plan in plans_of(v, options, budget, ["auto"])]
    guide, best = min(plans, key=lambda pair: pair[1].summary.step_time_s)
    named = [NamedWay(v) for v in variants]
    union = Union.of(named)
    assert union is not None
    way = MixedWay(union, named, guide, best.rows, budget, best.summary.step_time_s)
    judged = list[int]()

    def unknown(self: Union, other: NamedWay) -> list[int]:
        judged.append(len(other.way.nodes))
        return [-1] * len(other.way.nodes)

    monkeypatch.setattr(Union, "numbers_of", unknown)
    for _ in way.improve(time.monotonic() + 5):
        assert best.summary.step_time_s * SAME >= way.bound_s
    assert judged


def test_a_plan_states_the_bound_of_all_mixtures() -> None:
    """The summary names what is mixed; the plan is no slower; what cuts have found is a variant that can be made."""
    variants, options, fixed, eager = variants_for("gpt2", True)
    stated = 0
    for percent in (24, 32):
        request = PlanRequest(fixed + (eager - fixed) * percent // 100, slots=200)
        try:
            before = solve_variants(variants, options, request).summary
        except Infeasible:
            continue
        with bounds_as_proven() as bounds:
            after = solve_variants(variants, options, replace(request, cut_seconds=5.0)).summary
        assert after.step_time_s <= before.step_time_s * SAME
        assert after.bound_s == pytest.approx(min(bounds), rel=1e-12)
        assert after.bound_kind == ("mixed cuts" if after.bound_cuts else "once")
        assert after.bound_variant == "plain, packed"
        stated += bool(after.bound_cuts)
    assert stated


def test_where_plans_may_offload_mixtures_that_were_not_planned_are_said_not_to_be_bounded() -> None:
    """Each rewrite is bounded by itself, and the summary and its words say that no more is proven."""
    variants, options, fixed, eager = variants_for("layers", True)
    budget = fixed + (eager - fixed) * 45 // 100
    tier = LowerTier(Link(1e9, 1e9), 1 << 40, smallest_bytes=16)
    request = PlanRequest(budget, slots=60, lower_tier=tier, o_ilp_searches=0, cut_seconds=2.0)
    summary = solve_variants(variants, options, request).summary
    assert summary.bound_s > 0
    assert summary.bound_variant == "plain or packed"
    if summary.bound_cuts:
        assert "plain or packed, each as a whole and not all mixtures of them" in bound_words(summary)
