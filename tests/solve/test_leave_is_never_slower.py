"""With leave no plan is slower than the exact plan that there is without, which is one of those it is chosen among."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from stowage.stages.freezing.units import units_of
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.lossy import GradientError, Lossy
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition import make_blocks
from stowage.stages.rewrite import is_asked, rewritten, variants_of
from stowage.stages.rewrite.lossy import Classes, choices
from stowage.stages.solve import PlanRequest, Solved, Variant, solve_variants
from stowage.stages.solve import variants as variants_module
from stowage.stages.solve.frozen_ways import solve_frozen_ways
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.solve.prepared import light_options
from tests.solve.synthetic_steps import costs_for

KINDS = ("bf16", "int8", "int8_group", "int4_group")
LIMIT = 0.02
PERCENT = (22, 26, 34)


def costs_of(traces: Sequence[TraceTables]) -> dict[str, Cost]:
    """Costs with which attention's masks are worth packing, so that exact plans mix ways too, and codes are cheap.

    Args:
        traces: the step as it was recorded, its exact rewrite, and lossy ones.
    """
    recorded = {call.signature for each in traces[:2] for call in each.calls}
    costs = {cost.signature: cost for each in traces for cost in costs_for(each).values()}
    for each in traces:
        for call in each.calls:
            if call.is_random and {len(each.values[v].shape) for v in call.reads} == {4}:
                costs[call.signature] = replace(costs[call.signature], time_s=1e-3)
    for each in traces[2:]:
        for call in each.calls:
            if call.signature not in recorded:
                costs[call.signature] = replace(costs[call.signature], time_s=1e-7)
    return costs


@cache
def prepared() -> tuple[TraceTables, list[Variant], list[Option], list[GradientError]]:
    torch.manual_seed(0)
    shape = {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, attn_implementation="eager")).train()
    ids = torch.arange(128).reshape(2, 64) % 64
    trace = trace_step(model, {"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW(model.parameters()))
    found = Classes(trace)
    costs = costs_of([*variants_of(trace).values(), *found.everywhere(KINDS)])
    errors = [GradientError(kind, name, (LIMIT / 3) ** 2) for kind, name in found.members(KINDS)]
    names = choices(trace, costs, errors, Lossy(KINDS, LIMIT))
    assert names
    traces = variants_of(trace) | {name: rewritten(trace, name) for name in names}
    costs = costs_of(list(traces.values()))
    variants = [Variant(name, each, *make_blocks(each, costs)) for name, each in traces.items()]
    options = {(o.block_hash, o.option): o for v in variants for o in light_options(v.blocks, levels=4)}
    return trace, variants, list(options.values()), errors


def requests() -> list[PlanRequest]:
    trace, variants, _, errors = prepared()
    fixed = sum(s.nbytes for s in trace.storages if s.role != "temporary")
    whole = max(solve_variants(variants[:1], prepared()[2], PlanRequest(1 << 50)).summary.keep_all_peak_bytes, fixed)
    leave = {"slots": 60, "eviction_rules": 1, "lossy": True, "errors": errors, "max_gradient_error": LIMIT}
    return [PlanRequest(fixed + (whole - fixed) * percent // 100, **leave) for percent in PERCENT]


def exact_plan(request: PlanRequest) -> Solved | None:
    """Return the plan that there is where no variant must be asked for."""
    _, variants, options, _ = prepared()
    try:
        without = replace(request, lossy=False, errors=())
        return solve_variants([v for v in variants if not is_asked(v.name)], options, without)
    except Infeasible:
        return None


@pytest.mark.parametrize("margin", some([0.02, 0.5], keep=[0.02]))
def test_a_plan_with_leave_is_the_exact_one_or_faster(margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no lossy plan is faster by the margin, it is the very plan that there is without leave."""
    monkeypatch.setattr(variants_module, "NOISE", margin)
    _, variants, options, _ = prepared()
    same = lossy = 0
    for request in requests():
        exact = exact_plan(request)
        if exact is None:
            continue
        found = solve_variants(variants, options, request)
        assert found.summary.step_time_s <= exact.summary.step_time_s
        if found.summary.exact:
            assert found.summary.variant == exact.summary.variant
            assert found.summary.plan_hash == exact.summary.plan_hash
            assert found.rows == exact.rows
            same += 1
        else:
            assert found.summary.step_time_s < (1 - margin) * exact.summary.step_time_s
            lossy += 1
    assert same if margin == 0.5 else lossy


def test_it_holds_for_the_mean_of_masks() -> None:
    """A plan that is faster where everything trains may be slower under the mean mask."""
    trace, variants, options, _ = prepared()
    units = units_of(trace)
    freezable = Freezable(tuple(units), max(1, len(units) // 4))
    compared, plain = 0, [v for v in variants if not is_asked(v.name)]
    for request in requests()[1:2]:

        def solve(nbytes: int, rewrite: str = "", request: PlanRequest = request) -> Solved:
            return solve_variants(variants, options, replace(request, device_budget_bytes=nbytes, rewrite=rewrite))

        def without(nbytes: int, rewrite: str = "", request: PlanRequest = request) -> Solved:
            asked = replace(request, device_budget_bytes=nbytes, rewrite=rewrite, lossy=False, errors=())
            return solve_variants(plain, options, asked)

        try:
            exact = solve_frozen_ways(without, plain, freezable, request.device_budget_bytes, None)
        except Infeasible:
            continue
        found = solve_frozen_ways(solve, variants, freezable, request.device_budget_bytes, None)
        assert found.summary.step_time_s <= exact.summary.step_time_s
        if found.summary.exact:
            assert found.rows == exact.rows
        compared += 1
    assert compared
