"""No plan that fits under every mask has a lower mean time than the bound says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import fsum

import pytest

from stowage.stages.freezing.stored import guarded_plan, replayed_tier
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.units import ALWAYS, bit
from stowage.stages.rewrite import Way
from stowage.stages.solve import LowerTier, PlanRequest, Solved, Variant, solve_plan
from stowage.stages.solve.cuts.frozen_bound import frozen_bound
from stowage.stages.solve.frozen import freezing_plan, most_bytes
from tests.matrix import some
from tests.solve.collectives.rank_steps import Rates, Step
from tests.solve.cuts.test_mixtures_are_bounded import mixtures_of, variants_for
from tests.solve.prepared import Prepared, prepared_zoo

SAME = 1 + 1e-9


def plans_of(prepared: Prepared, way: Way, freezable: Freezable) -> Iterator[Solved]:
    """Plans of the step in which everything trains, within several budgets, with what they take under masks."""
    keep = solve_plan(way.trace, way.nodes, way.blocks, prepared.options, PlanRequest(1 << 50, slots=100))
    least, most = keep.summary.smallest_feasible_bytes, keep.summary.device_peak_bytes
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = least + int(share * (most - least))
        for method in ("auto", "rotor", "recompute_all", "sqrt"):
            try:
                request = PlanRequest(budget, method=method, slots=100)
                solved = solve_plan(way.trace, way.nodes, way.blocks, prepared.options, request)
            except (Infeasible, ParameterError):
                continue
            yield freezing_plan(way.trace, way.nodes, solved, freezable, budget)


def bounded(
    plan: Solved, guide: Way, ways: Sequence[Way], freezable: Freezable, budget: int, *, offloads: bool = False
) -> Solved:
    """The plan with the bound of every plan within a budget, whatever its own is."""
    asked = replace(plan, summary=replace(plan.summary, device_budget_bytes=budget, step_time_s=1e9))
    found = frozen_bound(asked, guide, ways, freezable, 3.0, offloads=offloads)
    assert found.summary.bound_s > 0
    return found


@pytest.mark.parametrize(("name", "share"), [("gpt2", 0.2), ("gpt2", 0.6), ("resnet", 0.6), ("unet", 0.6)])
def test_of_models(name: str, share: float) -> None:
    """With few units that train and with many; what convolutions read and normalisations leave out is taken in."""
    prepared = prepared_zoo(name)
    units = units_of(prepared.trace)
    freezable = Freezable(tuple(units), max(1, int(share * len(units))))
    way = Variant("plain", prepared.trace, prepared.nodes, prepared.blocks)
    plans = list(plans_of(prepared, way, freezable))
    said = 0
    for budget in sorted({most_bytes(p) for p in plans})[::3]:
        fitting = [p for p in plans if most_bytes(p) <= budget]
        best = min(fitting, key=lambda p: p.summary.step_time_s)
        found = bounded(best, way, [way], freezable, budget).summary
        assert all(p.summary.step_time_s * SAME >= found.bound_s for p in fitting)
        assert found.bound_s * SAME >= min(p.summary.lower_bound_s for p in plans), "every operation once at least"
        said += found.bound_kind == "cuts under masks"
    assert said, "no cut says more than every operation once at any budget"


def test_of_mixtures() -> None:
    """The bound of all rewrites together holds for the plans of each, and of their mixtures."""
    variants, options, _, _ = variants_for("gpt2", False)
    units = units_of(variants[0].trace)
    freezable = Freezable(tuple(units), len(units) // 3)
    plans: list[tuple[Way, Solved]] = []
    for way in [*variants, *mixtures_of(variants, 1)]:
        own = [o for o in options if o.block_hash in {b.block_hash for b in way.blocks}]
        prepared = Prepared(way.trace, list(way.nodes), list(way.blocks), own)
        plans += [(way, plan) for plan in plans_of(prepared, way, freezable)]
    for budget in sorted({most_bytes(p) for _, p in plans})[::12]:
        fitting = [(w, p) for w, p in plans if most_bytes(p) <= budget]
        guide, best = min(fitting, key=lambda pair: pair[1].summary.step_time_s)
        found = bounded(best, guide, variants, freezable, budget).summary
        assert found.bound_variant == "plain, packed"
        assert all(p.summary.step_time_s * SAME >= found.bound_s for _, p in fitting)


def mean_of_all(way: Way, plan: Solved, freezable: Freezable, tier: LowerTier | None) -> float:
    """The mean time over every mask, by the referee's clock."""
    guarded = guarded_plan(way.trace, way.nodes, plan.rows, plan.slots, freezable.units)
    replayed = replayed_tier(guarded, plan.summary.baseline_bytes)
    if tier is not None:
        replayed = replace(replayed, link=tier.link)
    masks = list(combinations(range(len(freezable.units)), freezable.active))
    times = [guarded.under(ALWAYS | sum(map(bit, mask))).replay(tier=replayed).time_s for mask in masks]
    return fsum(times) / len(masks)


@pytest.mark.parametrize(
    ("collectives", "offloads"),
    some([(1e10, False), (5e7, False), (1e10, True), (5e7, True)], keep=[(5e7, False), (1e10, True)]),
)
def test_of_ranks(collectives: float, offloads: bool) -> None:
    """Collectives that take less than computing, or more; with a lower tier and without."""
    ranks = Step("llama", 2, collectives, Rates(1e9, 1e10))
    way = ranks.costed.variants[0]
    tier = ranks.tier if offloads else None
    freezable = Freezable(tuple(units_of(way.trace)), 2)
    keep = solve_plan(way.trace, way.nodes, way.blocks, ranks.options, PlanRequest(1 << 50, slots=100))
    least, most = keep.summary.smallest_feasible_bytes, keep.summary.device_peak_bytes
    plans = []
    for share in (-0.3,) if offloads else (0.0, 0.3, 1.0):
        budget = least + int(share * (most - least))
        request = PlanRequest(budget, slots=100, lower_tier=tier, o_ilp_searches=0)
        try:
            solved = solve_plan(way.trace, way.nodes, way.blocks, ranks.options, request)
        except Infeasible:
            continue
        plan = freezing_plan(way.trace, way.nodes, solved, freezable, budget, tier)
        plans.append((plan, mean_of_all(way, plan, freezable, tier)))
    assert any(p.slots for p, _ in plans) == offloads
    for budget in sorted({most_bytes(p) for p, _ in plans}):
        fitting = [(p, mean_s) for p, mean_s in plans if most_bytes(p) <= budget]
        found = bounded(fitting[0][0], way, [way], freezable, budget, offloads=offloads).summary
        assert all(mean_s * SAME >= found.bound_s for _, mean_s in fitting)
        if offloads or collectives < 1e8:
            assert found.bound_kind == "once"
        assert found.bound_s > 0.3 * min(mean_s for _, mean_s in fitting), "half of what the longer lane has, at least"
