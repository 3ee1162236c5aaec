"""Plan with a lower tier, train under the plan, and compare with plain PyTorch bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.device.tiers import Tier
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.machine import Link
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.solve import LowerTier, PlanRequest, solve_plan
from stowage.stages.solve.summary import Solved
from tests.runtime.beside_eager import MakeOptimizer, differences, eager_step, same
from tests.solve.prepared import Prepared
from tests.zoo import Entry, loss_of

LINK = Link(offload_bytes_per_s=1e9, reload_bytes_per_s=1e9, duplex_bytes_per_s=1.5e9)
LOWER_TIER = LowerTier(LINK, capacity_bytes=1 << 40, staging_bytes=0, smallest_bytes=1024)


def solve_with_lower_tier(
    prepared: Prepared, budget: int, method: str = "offmate", lower_tier: LowerTier = LOWER_TIER
) -> Solved:
    """A plan that may offload."""
    return solve_plan(
        prepared.trace,
        prepared.nodes,
        prepared.blocks,
        prepared.options,
        PlanRequest(budget, method=method, slots=100, device="made up", lower_tier=lower_tier),
    )


def smallest_with_lower_tier(prepared: Prepared, lower_tier: LowerTier = LOWER_TIER) -> int:
    """The smallest budget for which there is a plan that offloads."""
    try:
        solve_with_lower_tier(prepared, 1, lower_tier=lower_tier)
    except Infeasible as infeasible:
        return infeasible.smallest_feasible_bytes
    raise AssertionError("one byte is enough")


def program_with_lower_tier(
    prepared: Prepared, solved: Solved, model: nn.Module, optimizer: torch.optim.Optimizer | None, tier: Tier
) -> tuple[Program, Offloading]:
    """Generate the step and bind it to a model and a tier."""
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, solved.slots)
    known = manifest_of(source, solved.summary.plan_hash, solved.summary.configuration_hash).source_hash
    offloading = Offloading(tier, model, optimizer)
    program = bind(source, known, f"step_{known[:8]}.py", prepared.trace, model, optimizer, solved.slots, offloading)
    return program, offloading


def assert_equal_with_lower_tier(
    build: Callable[[], Entry],
    prepared: Prepared,
    solved: Solved,
    tier: Tier,
    optimizer: MakeOptimizer,
    *,
    iterations: int = 5,
    moves: set[str] | None = None,
    max_grad_norm: float | None = None,
) -> list[float]:
    """Losses, norms and the random state after every iteration; then every parameter, buffer and state, and which of
    them move: those of `moves` and no other, by default all that train and that move in plain PyTorch.

    Returns:
        The norms, where gradients are clipped.
    """
    norms: list[float] = []
    (eager, batch, loss), (model, _, _) = build(), build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    eager_optimizer, planned_optimizer = optimizer(eager), optimizer(model)
    program, offloading = program_with_lower_tier(prepared, solved, model, planned_optimizer, tier)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        state = torch.get_rng_state()
        for iteration in range(iterations):
            torch.set_rng_state(state)
            expected, norm = clipped_step(eager, batch, loss, eager_optimizer, max_grad_norm)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            found = program(batch)
            assert torch.equal(torch.get_rng_state(), after), f"random state after iteration {iteration}"
            assert same(found.detach(), expected), f"loss of iteration {iteration}: {found} and {expected}"
            assert (program.grad_norm is None) == (norm is None)
            if norm is not None:
                assert same(program.grad_norm, norm), f"norm of iteration {iteration}"
                norms.append(float(norm))
            state = after
    offloading.fetch_all()
    assert differences(model, eager) == []
    assert same(planned_optimizer.state_dict(), eager_optimizer.state_dict())
    still = [n for n, p in model.named_parameters() if p.requires_grad and torch.equal(p, before[n])]
    moved_in_eager = [n for n in still if not torch.equal(dict(eager.named_parameters())[n], before[n])]
    assert moved_in_eager == []
    if moves is not None:
        assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == moves
    return norms


def clipped_step(
    model: nn.Module, batch: Any, loss: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One iteration of plain PyTorch: the loss, and the norm by which gradients were clipped."""
    if max_grad_norm is None:
        return eager_step(model, batch, loss, optimizer), None
    value = loss_of(model, batch, loss)
    torch.autograd.backward(value)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value.detach(), norm


def actions(solved: Solved) -> dict[str, Any]:
    """How many rows of each kind."""
    found: dict[str, int] = {}
    for row in solved.rows:
        found[row.action] = found.get(row.action, 0) + 1
    return found
