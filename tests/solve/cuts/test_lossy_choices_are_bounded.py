"""No plan that keeps tensors in fewer bits, within the limit on the gradient's error, is faster than the bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.lossy import GradientError, Lossy
from stowage.stages.ir.plan import Option
from stowage.stages.partition import make_blocks
from stowage.stages.rewrite import Way, exchangeable, is_exact, mixed, rewritten, variants_of
from stowage.stages.rewrite.lossy import Classes, choices, described
from stowage.stages.solve import PlanRequest, Variant, eager_peak_bytes, solve_variants
from stowage.stages.solve.cuts.charges import charges_of
from stowage.stages.solve.cuts.naming import NamedWay
from stowage.stages.solve.cuts.union import Union
from tests.matrix import some
from tests.solve.cuts.test_mixtures_are_bounded import SAME, gpt2, plans_of
from tests.solve.cuts.unclamped import bounds_as_proven
from tests.solve.prepared import light_options
from tests.solve.synthetic_steps import costs_for

KINDS = ("int8", "int4_tensor")

LIMIT = 0.01


@cache
def lossy_variants() -> tuple[list[Variant], list[Option], list[GradientError]]:
    """A step as recorded, its masks packed, and choices of classes whose errors were made up."""
    trace = gpt2()
    classes = Classes(trace)
    draw = random.Random(2)
    errors = [GradientError(k, name, draw.uniform(0.02, 0.6) * LIMIT**2) for k, name in classes.members(KINDS)]
    costs: dict[str, Cost] = dict(costs_for(trace))
    for made in [*variants_of(trace).values(), *classes.everywhere(KINDS)]:
        costs |= costs_for(made)
    traces = variants_of(trace)
    traces |= {name: rewritten(trace, name) for name in choices(trace, costs, errors, Lossy(KINDS, LIMIT))}
    for made in traces.values():
        costs |= costs_for(made)
    variants = [Variant(name, made, *make_blocks(made, costs)) for name, made in traces.items()]
    options = {(o.block_hash, o.option): o for v in variants for o in light_options(v.blocks, levels=6)}
    return variants, list(options.values()), errors


def some_mixtures(ways: Sequence[Way], count: int) -> list[Way]:
    draw = random.Random(7)
    first, *others = ways
    exchanged = [set(range(len(first.blocks))), *(set(exchangeable(first, way)) for way in others)]
    found: list[Way] = []
    while len(found) < count:
        taken = [draw.choice([k for k, own in enumerate(exchanged) if b in own]) for b in range(len(first.blocks))]
        way = mixed(ways, taken)
        if way is not None:
            found.append(way)
    return found


def test_what_packs_costs_a_part_of_the_error() -> None:
    """Every node that forward does besides, but for masks, is charged to the classes that it packs."""
    variants, _, errors = lossy_variants()
    assert any(not is_exact(v.name) for v in variants)
    request = PlanRequest(1, lossy=True, errors=errors, max_gradient_error=LIMIT)
    named = [NamedWay(v) for v in variants]
    union = Union.of(named, charges_of(variants[0], variants, request))
    assert union is not None
    graph = union.graph
    for way in [*variants, *some_mixtures(variants, 4)]:
        numbers = union.numbers_of(NamedWay(way))
        assert -1 not in numbers
        error = described(variants[0].trace, way.name, errors)[1]
        charged = sum(c.share for c in graph.charges if not c.nodes.isdisjoint(numbers))
        assert charged == pytest.approx(error**2 / LIMIT**2)
    assert any(graph.instead.values()), "backward reads what is unpacked instead"


@pytest.mark.parametrize("limit", some([LIMIT, LIMIT / 2], keep=[LIMIT]))
def test_no_allowed_plan_beats_the_bound(limit: float) -> None:
    """Whole choices, and mixtures of their blocks; within a smaller limit fewer of them are allowed."""
    variants, options, errors = lossy_variants()
    trace = variants[0].trace
    fixed = sum(s.nbytes for s in trace.storages if s.role != "temporary")
    eager = eager_peak_bytes(trace, variants[0].nodes)
    request = PlanRequest(1, slots=100, lossy=True, errors=errors, max_gradient_error=limit)
    above_once = 0
    for percent in (25, 40):
        asked = replace(request, device_budget_bytes=fixed + (eager - fixed) * percent // 100)
        try:
            before = solve_variants(variants, options, asked).summary
        except Infeasible:
            continue
        with bounds_as_proven() as bounds:
            after = solve_variants(variants, options, replace(asked, cut_seconds=5.0)).summary
        assert after.step_time_s <= before.step_time_s * SAME
        assert after.bound_s == pytest.approx(min(bounds), rel=1e-12)
        assert after.gradient_error <= limit
        for way in [*variants, *some_mixtures(variants, 4)]:
            if described(trace, way.name, errors)[1] <= limit:
                for plan in plans_of(way, options, asked.device_budget_bytes, ["auto"]):
                    assert plan.summary.step_time_s * SAME >= after.bound_s
        above_once += bool(after.bound_cuts)
    assert above_once
