"""Dropout masks as bytes: the same numbers, a quarter of the bytes, and the plan that is faster is taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.plan import Option
from stowage.stages.rewrite import pack_masks, variants_of
from stowage.stages.solve import PlanRequest, Solved, Variant, solve_variants
from stowage.stages.trace import trace_step


def network() -> nn.Module:
    """Layers whose masks weigh as much as their activations."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.3))]
    return nn.Sequential(*layers)


def loss(outputs: torch.Tensor, batch: object) -> torch.Tensor:
    del batch
    return (outputs**2).mean()


BATCH = torch.linspace(-1, 1, 256 * 32).reshape(256, 32)


def test_masks_take_one_byte_an_element() -> None:
    trace = trace_step(network(), BATCH, loss=loss)
    packed = pack_masks(trace)
    bits = [s for s in packed.storages if s.name.endswith(".bits")]
    assert [s.nbytes for s in bits] == [256 * 32] * 6
    draws = [c for c in packed.calls if c.is_random]
    assert [packed.storages[s].name.rpartition(".")[2] for c in draws for s in c.mutates] == ["draw"] * 6
    assert packed.meta == trace.meta
    assert packed.gradients == trace.gradients


def test_a_model_without_dropout_has_one_variant() -> None:
    trace = trace_step(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), BATCH, loss=loss)
    assert pack_masks(trace) is trace
    assert list(variants_of(trace)) == ["plain"]


def test_the_first_draws_stay_in_order() -> None:
    packed = pack_masks(trace_step(network(), BATCH, loss=loss))
    order = [packed.storages[c.mutates[0]].name for c in packed.calls if c.is_random]
    assert order == sorted(order, key=lambda name: next(s.storage for s in packed.storages if s.name == name))


def test_training_on_packed_masks_equals_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def solve_packed(
        variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, *known: object
    ) -> Solved:
        """Which variant is faster within the tightest budget depends on the machine."""
        return solve_variants([v for v in variants if v.name == "packed"], options, request, *known)  # type: ignore[arg-type]

    monkeypatch.setattr("stowage.flows.planning.step.solve_variants", solve_packed)

    def adam(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-2)  # type: ignore[arg-type]

    model, eager = network(), network()
    with pytest.raises(Infeasible) as found:
        fit(model, BATCH, adam, device_budget=1, loss=loss, cache_dir=tmp_path, quick=True)
    budget = found.value.smallest_feasible_bytes
    step = fit(model, BATCH, adam, device_budget=budget, loss=loss, cache_dir=tmp_path, quick=True)
    assert step.plan.variant == "packed"
    optimizer = adam(eager.parameters())
    torch.manual_seed(3)
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        value = loss(eager(BATCH), BATCH)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(value.item())
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert [step(BATCH).item() for _ in range(3)] + [step.measure(BATCH).loss] == expected
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


def test_with_room_for_everything_masks_stay_as_they_are(tmp_path: Path) -> None:
    step = fit(network(), BATCH, device_budget="200%", loss=loss, cache_dir=tmp_path, quick=True)
    assert step.plan.variant == "plain"
    assert step.plan.recomputed_bytes == 0
