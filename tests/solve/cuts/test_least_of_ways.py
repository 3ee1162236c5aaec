"""Where rewrites cannot be exchanged block by block the bound of a plan is the least of theirs, whichever it is of."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.partition import make_variants
from stowage.stages.rewrite import exchangeable, variants_of
from stowage.stages.solve import PlanRequest, Solved, Variant, eager_peak_bytes, solve_plan
from stowage.stages.solve.cuts.proven import Planned, proven
from stowage.stages.solve.cuts.way import CutWay
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.solve.cuts.test_mixtures_are_bounded import Skips
from tests.solve.cuts.unclamped import bounds_as_proven
from tests.solve.prepared import light_options
from tests.solve.synthetic_steps import costs_for

SAME = 1 + 1e-12
"""The same times may be added up in another order."""


@cache
def apart() -> tuple[list[Variant], list[Option], TraceTables]:
    """Two rewrites of a step, each cut around its own long-lived values."""
    model = Skips()
    batch = torch.linspace(-1, 1, 256 * 32).reshape(256, 32)
    adam = torch.optim.Adam(model.parameters())
    traces = variants_of(trace_step(model, batch, loss=lambda out, _: (out**2).mean(), optimizer=adam))
    costs: dict[str, Cost] = {k: c for each in traces.values() for k, c in costs_for(each).items()}
    made = make_variants(traces, costs, max_exact_nodes=6)
    found = []
    for rewrite, chains in made.items():
        cut = chains["long_lived"]
        found.append(Variant(VariantName(rewrite, "long_lived").text, traces[rewrite], cut.nodes, cut.blocks))
    options = {(o.block_hash, o.option): o for v in found for o in light_options(v.blocks)}
    return found, list(options.values()), traces["plain"]


def plan_of(variant: Variant, options: list[Option], request: PlanRequest) -> Solved:
    """The plan of one rewrite alone."""
    own = [o for o in options if o.block_hash in {b.block_hash for b in variant.blocks}]
    return solve_plan(variant.trace, variant.nodes, variant.blocks, own, request)


@pytest.mark.parametrize("share", some([0.85, 0.95], keep=[0.95]))
@pytest.mark.parametrize("turned", [False, True], ids=["plain first", "packed first"])
def test_no_plan_of_either_is_faster_than_what_both_state(share: float, turned: bool) -> None:
    """Where the bound of the slower rewrite is above the plans of the faster one, only the least is a bound."""
    variants, options, trace = apart()
    assert not exchangeable(*variants)
    fixed = sum(s.nbytes for s in trace.storages if s.role != "temporary")
    eager = eager_peak_bytes(trace, variants[0].nodes)
    request = PlanRequest(fixed + int(share * (eager - fixed)), slots=100, cut_seconds=8.0)
    plans = [Planned(v, plan_of(v, options, request)) for v in (reversed(variants) if turned else variants)]
    before_s = {p.way.name: p.plan.summary.step_time_s for p in plans if p.plan is not None}
    with bounds_as_proven() as bounds:
        found = proven(plans, [], request, lambda way: True)
    assert len(found) == len(bounds) == 2
    least_s = min(bounds)
    assert max(bounds) == least_s, "both plans state the same bound"
    fastest_s = min(s.summary.step_time_s for s in found)
    assert least_s <= fastest_s * SAME
    assert fastest_s <= min(before_s.values()) * SAME
    assert {s.summary.bound_variant for s in found} < {v.name for v in variants}
    once_s = {
        v.name: CutWay(v, program_of(v.trace, v.nodes), [], request.device_budget_bytes).bound_s for v in variants
    }
    assert max(once_s.values()) > fastest_s, "the other rewrite's bound would pass for one of all plans"
