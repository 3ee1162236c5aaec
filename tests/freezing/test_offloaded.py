"""Plans with a lower tier freeze too: copies of what is frozen are left out, and the numbers are plain PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.device.tiers import NullTier
from stowage.stages.freezing.levels import levels_of
from stowage.stages.freezing.stored import guarded_plan, replayed_tier
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.units import mask_of
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.moves import Moves
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.solve import eager_peak_bytes
from stowage.stages.solve.summary import Solved
from tests.freezing.frozen import adamw, masks, plain_step
from tests.matrix import some
from tests.offload.with_lower_tier import (
    LOWER_TIER,
    actions,
    smallest_with_lower_tier,
    solve_with_lower_tier,
)
from tests.runtime.beside_eager import differences, same
from tests.solve.prepared import Prepared, prepared_zoo
from tests.zoo import ZOO

BY_CPU = replace(LOWER_TIER, cpu_update_bytes_per_s=1e10)


def plans(name: str, by_cpu: bool) -> tuple[Prepared, Solved]:
    """A plan within little memory."""
    prepared = prepared_zoo(name)
    if by_cpu:
        budget = int(0.4 * eager_peak_bytes(prepared.trace, prepared.nodes))
        return prepared, solve_with_lower_tier(prepared, budget, lower_tier=BY_CPU)
    least = smallest_with_lower_tier(prepared)
    kept = prepared.solve().summary.device_peak_bytes
    return prepared, solve_with_lower_tier(prepared, least + (kept - least) // 8)


@pytest.mark.parametrize("by_cpu", [False, True])
@pytest.mark.parametrize("name", some(["gpt2", "llama", "bert"], keep=["gpt2"]))
def test_the_referee_accepts_every_mask(name: str, by_cpu: bool) -> None:
    prepared, solved = plans(name, by_cpu)
    assert actions(solved)["offload"] > 0
    units = units_of(prepared.trace)
    plan = guarded_plan(prepared.trace, prepared.nodes, solved.rows, solved.slots, units)
    tier = replayed_tier(plan, solved.summary.baseline_bytes)
    levels = levels_of(plan, tier.staging_bytes)
    for active in masks(units, 15):
        mask = mask_of(units, active)
        found = plan.under(mask).replay(tier=tier)
        assert found.peak_bytes == max(level.under(mask) for level in levels), active


@pytest.mark.parametrize("by_cpu", [False, True])
@pytest.mark.parametrize("name", some(["gpt2", "llama", "bert"], keep=["gpt2"]))
def test_equal_to_plain(name: str, by_cpu: bool) -> None:
    prepared, solved = plans(name, by_cpu)
    assert (actions(solved).get("update", 0) > 0) == by_cpu
    units = units_of(prepared.trace)
    (plain, batch, loss), (model, _, _) = ZOO[name](), ZOO[name]()
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, solved.slots, units)
    known = manifest_of(source, "", "").source_hash
    offloading = Offloading(NullTier(), model, optimizer)
    names = [unit.name for unit in units]
    program = bind(
        source, known, "offloaded.py", prepared.trace, model, optimizer, solved.slots, offloading, units=names
    )
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for number, active in enumerate(masks(units, 10)):
        torch.set_rng_state(state)
        expected = plain_step(plain, batch, loss, plain_optimizer, units, active)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        program.active.choose(active)
        assert same(program(batch).detach(), expected), f"loss of iteration {number} ({active})"
        assert torch.equal(torch.get_rng_state(), after)
        state = after
    offloading.fetch_all()
    assert differences(model, plain) == []
    assert same(optimizer.state_dict(), plain_optimizer.state_dict())


@pytest.mark.parametrize("by_cpu", [False, True])
def test_moves_are_measured_wherever_updates_run(by_cpu: bool) -> None:
    prepared, solved = plans("gpt2", by_cpu)
    units = units_of(prepared.trace)
    (plain, batch, loss), (model, _, _) = ZOO["gpt2"](), ZOO["gpt2"]()
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, solved.slots, units)
    known = manifest_of(source, "", "").source_hash
    offloading = Offloading(NullTier(), model, optimizer)
    names = [unit.name for unit in units]
    program = bind(source, known, "moves.py", prepared.trace, model, optimizer, solved.slots, offloading, units=names)
    program.moves = Moves(units, relative=False)
    torch.manual_seed(5)
    for active in (names, names[2:5]):
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        state = torch.get_rng_state()
        plain_step(plain, batch, loss, plain_optimizer, units, active)
        torch.set_rng_state(state)
        program.active.choose(active)
        program(batch)
        offloading.await_updates()
        found, after = program.moves.take(), {name: p.detach() for name, p in plain.named_parameters()}
        assert list(found) == active
        for unit in units:
            if unit.name in active:
                moved = sum(float((after[n] - before[n]).abs().sum()) for n in unit.parameters)
                size = sum(float(before[n].abs().sum()) for n in unit.parameters)
                assert found[unit.name] == pytest.approx(moved / size, rel=1e-4)
    assert program.moves.take() == {}
