"""Values in codes, offloaded weights and updates by the CPU in one plan: the numbers of plain PyTorch with those codes.

Across ranks the same is in `tests/sharding/test_codes_on_ranks.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from stowage.flows import Lossy, TrainingStep, fit
from stowage.flows.benchmarks.slimfit.by_the_cpu import updates_by_the_cpu
from stowage.flows.benchmarks.slimfit.pair_job import coded_tensors, updated_by_the_cpu
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.trace import trace_step
from tests.api.test_leave_is_not_stored import first_lossy
from tests.configurations.alongside import Plain, batches, small_gpt2
from tests.configurations.test_offloaded_gradients import adamw, assert_alike
from tests.freezing.beside import Given, assert_equal_to_plain, freeze
from tests.rewrite.packed_by_hooks import Chosen, hooked


def fitted(given: list[Any], stores: Path, **more: Any) -> TrainingStep:
    model = small_gpt2(n_embd=128, n_positions=64)
    state = 4 * sum(p.nbytes for p in model.parameters())
    with updates_by_the_cpu(), mock.patch("stowage.flows.planning.step.solve_variants", first_lossy):
        return fit(
            model,
            given[0],
            adamw,
            device_budget=int(0.45 * state),
            method="offmate",
            cache_dir=stores,
            quick=True,
            lossy=Lossy("bf16", 0.1),
            say=lambda text: None,
            **more,
        )


def assert_all_three(step: TrainingStep) -> None:
    """The plan has codes, offloads, and updates by the CPU."""
    assert not step.plan.exact
    assert coded_tensors(step.plan.variant) > 0
    assert updated_by_the_cpu(step) > 0
    assert step.plan.lower_tier_bytes > 0


def test_they_train_as_plain_pytorch_with_the_same_codes(fit_stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    plain = small_gpt2(n_embd=128, n_positions=64)
    given = batches(plain, 6)
    step = fitted(given, fit_stores)
    assert_all_three(step)
    chosen = Chosen.of(trace_step(plain, given[0]), step.plan.variant)
    reference = Plain(plain, adamw(plain.parameters()), around=lambda: hooked(chosen))
    assert_alike(step, reference, given[:5], [True] * 5)
    assert torch.isfinite(step(given[5]))


@pytest.mark.long
def test_so_they_do_with_masks_that_change(fit_stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen is neither updated by the CPU nor kept in codes for its gradient."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    plain, policy = small_gpt2(n_embd=128, n_positions=64), Given()
    given = batches(plain, 6)
    step = fitted(given, fit_stores, freeze=freeze(policy))
    assert_all_three(step)
    chosen = Chosen.of(trace_step(plain, given[0]), step.plan.variant)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        with hooked(chosen):
            loss: torch.Tensor = model(**batch).loss
            return loss

    assert_equal_to_plain(step, policy, plain, adamw(plain.parameters()), loss_of, given, updates=8)
