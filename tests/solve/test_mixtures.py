"""Plans in which some blocks are rewritten: chosen where they are faster, exact, and never lossy unasked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from stowage.flows import fit
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.partition import make_blocks
from stowage.stages.rewrite import REWRITES, Rewrite, mixed, rewritten, variant_named, variants_of
from stowage.stages.solve import PlanRequest, Solved, Variant, eager_peak_bytes, solve_plan, solve_variants
from stowage.stages.trace import trace_step
from tests.solve.prepared import light_options
from tests.solve.synthetic_steps import costs_for

BATCH = torch.linspace(-1, 1, 256 * 32).reshape(256, 32)


class Layers(nn.Module):
    """Layers whose masks weigh as much as their activations, and a number that changes between steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        stack = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.3))]
        self.layers = nn.Sequential(*stack)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x) * self.scale
        return out


def loss(outputs: torch.Tensor, batch: object) -> torch.Tensor:
    del batch
    return (outputs**2).mean()


def recorded() -> TraceTables:
    model = Layers()
    return trace_step(model, BATCH, loss=loss, optimizer=torch.optim.Adam(model.parameters()))


def variants_with(trace: TraceTables, costs: dict[str, Cost]) -> list[Variant]:
    found = []
    for name, each in variants_of(trace).items():
        nodes, blocks = make_blocks(each, costs)
        found.append(Variant(name, each, nodes, blocks))
    return found


def all_costs(trace: TraceTables) -> dict[str, Cost]:
    return {k: c for each in variants_of(trace).values() for k, c in costs_for(each).items()}


def options_for(variants: Sequence[Variant]) -> list[Option]:
    found = {(o.block_hash, o.option): o for v in variants for o in light_options(v.blocks, levels=8)}
    return list(found.values())


def test_a_mixture_is_taken_where_it_is_faster_than_either() -> None:
    """To draw attention's masks again is dear here, and the other masks are small: blocks differ in what is best."""
    torch.manual_seed(0)
    shape = {"n_layer": 4, "n_embd": 64, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, attn_implementation="eager")).train()
    ids = torch.arange(128).reshape(2, 64) % 64
    trace = trace_step(model, {"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW(model.parameters()))
    variants = variants_with(trace, dear_draws(trace))
    options = options_for(variants)
    eager = eager_peak_bytes(trace, variants[0].nodes)
    seen = set()
    fixed = sum(s.nbytes for s in trace.storages if s.role != "temporary")
    for percent in (24, 28, 32):
        request = PlanRequest(fixed + (eager - fixed) * percent // 100, slots=200)
        try:
            solved = solve_variants(variants, options, request)
        except Infeasible:
            continue
        alone = [solve_alone(v, options, request) for v in variants]
        assert solved.summary.step_time_s <= min(alone)
        assert solved.summary.device_peak_bytes <= request.device_budget_bytes
        if solved.summary.variant not in ("plain", "packed"):
            assert solved.summary.step_time_s < min(alone)
            found = variant_named(variants, solved.summary.variant)
            assert found is not None
            assert found.trace == rewritten(trace, solved.summary.variant)
            seen.add(solved.summary.variant)
    assert seen, "no budget for which blocks differ in their way"
    assert all(VariantName.of(name).parts[0][0] == "packed" for name in seen)


def dear_draws(trace: TraceTables) -> dict[str, Cost]:
    """Costs with which attention's masks are worth packing: they are many numbers, and dear to draw again."""
    costs = all_costs(trace)
    for each in variants_of(trace).values():
        for call in each.calls:
            if call.is_random and {len(each.values[v].shape) for v in call.reads} == {4}:
                costs[call.signature] = replace(costs[call.signature], time_s=1e-3)
    return costs


def solve_alone(variant: Variant, options: Sequence[Option], request: PlanRequest) -> float:
    own = [o for o in options if o.block_hash in {b.block_hash for b in variant.blocks}]
    try:
        solved = solve_plan(variant.trace, variant.nodes, variant.blocks, own, request)
    except Infeasible:
        return float("inf")
    return solved.summary.step_time_s


def test_training_on_a_mixture_equals_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that change between steps, dropout, and the plan read back from its store."""
    taken_names: list[str] = []

    def solve_mixed(variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, *_: Any) -> Solved:
        taken = [block % 2 for block in range(len(variants[0].blocks))]
        way = mixed(variants[:2], taken)
        assert way is not None
        own = [o for o in options if o.block_hash in {b.block_hash for b in way.blocks}]
        solved = solve_plan(way.trace, way.nodes, way.blocks, own, request)
        taken_names.append(way.name)
        return replace(solved, summary=replace(solved.summary, variant=way.name))

    monkeypatch.setattr("stowage.flows.planning.step.solve_variants", solve_mixed)

    def adam(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-2)  # type: ignore[arg-type]

    with pytest.raises(Infeasible) as found:
        fit(Layers(), BATCH, adam, device_budget=1, loss=loss, cache_dir=tmp_path, quick=True)
    budget = found.value.smallest_feasible_bytes
    eager = Layers()
    optimizer = adam(eager.parameters())
    torch.manual_seed(3)
    expected = []
    for number in range(5):
        eager.scale = 1.0 + number / 8
        optimizer.zero_grad()
        value = loss(eager(BATCH), BATCH)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(value.item())
    for _ in range(2):  # the second time the plan is in the store
        model = Layers()
        step = fit(model, BATCH, adam, device_budget=budget, loss=loss, cache_dir=tmp_path, quick=True)
        assert step.plan.variant.startswith("packed[")
        torch.manual_seed(3)
        losses = []
        for number in range(5):
            model.scale = 1.0 + number / 8
            losses.append(step(BATCH).item())
        assert losses == expected
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert len(set(taken_names)) == 1


def test_a_lossy_rewrite_is_taken_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def faster(trace: TraceTables, where: Any) -> TraceTables:
        """Another tanh, as a lossy kernel might be: its calls have a signature, and costs, of their own."""
        calls = [replace(c, signature="quick " + c.signature) if is_tanh(c) and where(c) else c for c in trace.calls]
        return replace(trace, calls=calls)

    def is_tanh(call: Call) -> bool:
        return call.target == "aten.tanh.default"

    rewrite = Rewrite("rough", faster, lambda trace: [c.call for c in trace.calls if is_tanh(c)], exact=False)
    monkeypatch.setitem(REWRITES, "rough", rewrite)
    trace = recorded()
    costs = all_costs(trace)
    costs |= {k: replace(c, time_s=c.time_s / 1000) for k, c in costs.items() if k.startswith("quick")}
    variants = variants_with(trace, costs)
    assert "rough" in [v.name for v in variants]
    options = options_for(variants)
    request = PlanRequest(eager_peak_bytes(trace, variants[0].nodes) * 7 // 10, slots=200)
    exact = solve_variants(variants, options, request).summary
    assert exact.exact
    assert "rough" not in exact.variant
    lossy = solve_variants(variants, options, replace(request, lossy=True)).summary
    assert lossy.step_time_s < exact.step_time_s
    assert "rough" in lossy.variant
    assert not lossy.exact
    monkeypatch.setattr(
        "stowage.stages.solve.variants.described",
        lambda trace, name, errors: ((name,), 0.4) if "rough" in name else ((), 0.0),
    )
    within = replace(request, lossy=True, max_gradient_error=0.5)
    assert "rough" in solve_variants(variants, options, within).summary.variant
    beyond = solve_variants(variants, options, replace(within, max_gradient_error=0.3)).summary
    assert "rough" not in beyond.variant, "no mixture goes beyond the limit of the error either"
    assert beyond.step_time_s == exact.step_time_s
