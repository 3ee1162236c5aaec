"""`stow(trainer, lossy=...)` under a plan with codes: it trains, saves, and resumes.

On two ranks the same is in `tests/sharding/test_frozen_trainer.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import Lossy
from stowage.flows.api.measured_batches import NONE_LIKE_IT, ONE_BATCH, measured_batches
from stowage.stages.rewrite.lossy import saved as saved_module
from tests.api.test_leave_is_not_stored import first_lossy
from tests.configurations.alongside import small_gpt2
from tests.configurations.test_trainer import EVEN, assert_same_run, logs, planned, trainer_of

STEPS, SAVED = 6, 3
KIND = "int8_tensor"
RUN: dict[str, Any] = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": SAVED,
    "per_device_train_batch_size": 4,
    "max_grad_norm": 0.0,  # gradients that wait for their norm would take more than activations
}


@pytest.fixture(autouse=True)
def _codes_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with codes is taken, whether it is the fastest or not, of small values too."""
    monkeypatch.setattr("stowage.flows.planning.step.solve_variants", first_lossy)
    monkeypatch.setattr(saved_module, "SMALLEST", 64)


def trained(folder: Path, stores: Path, **train: Any) -> Any:
    trainer = trainer_of(folder, small_gpt2(), EVEN, **RUN)
    trainer = planned(trainer, stores, device_budget="90%", lossy=Lossy(KIND, 0.5))
    trainer.train(**train)
    plan = trainer.stowage.plan
    assert not plan.exact
    assert plan.lossy
    assert all(kept.startswith(f"{KIND}: ") for kept in plan.lossy)
    assert 0 < plan.gradient_error <= 0.5
    assert f"_{KIND}_codes" in trainer.stowage.step.planned.source
    return trainer


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in logs(trainer) if "loss" in row]


def test_resumed_equals_uninterrupted(tmp_path: Path, fit_stores: Path) -> None:
    """The first loss is plain PyTorch's, as forward is; those that follow are of weights that codes have changed."""
    whole = trained(tmp_path / "whole", fit_stores)
    torch.manual_seed(11)  # what another process would have drawn before
    checkpoint = tmp_path / "whole" / f"checkpoint-{SAVED}"
    again = trained(tmp_path / "again", fit_stores, resume_from_checkpoint=str(checkpoint))
    assert losses(again) == losses(whole)
    assert len(losses(whole)) == STEPS
    assert again.stowage.plan.plan_hash == whole.stowage.plan.plan_hash
    assert_same_run(again, whole, resumed=True)
    plain = trainer_of(tmp_path / "plain", small_gpt2(), EVEN, **RUN)
    plain.train()
    assert losses(plain)[0] == losses(whole)[0]
    assert all(one != other for one, other in zip(losses(plain)[1:], losses(whole)[1:], strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_given_batches_are_measured_on(
    accumulate: int, tmp_path: Path, fit_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a loader, and the Trainer goes on as without them."""
    found: list[tuple[int, str]] = []

    def measured(batch: Any, lossy: Lossy) -> Any:
        batches, notice = measured_batches(batch, lossy)
        found.append((len(batches), notice))
        return batches, notice

    monkeypatch.setattr("stowage.flows.api.programs.measured_batches", measured)
    run = {**RUN, "max_steps": 2, "save_strategy": "no", "gradient_accumulation_steps": accumulate}
    firsts: list[tuple[float, list[int]]] = []
    for name in ("loader", "alone"):
        said: list[str] = []
        trainer = trainer_of(tmp_path / name, small_gpt2(), EVEN, **run)
        leave = Lossy(KIND, 0.5, trainer.get_train_dataloader() if name == "loader" else ())
        torch.manual_seed(3)
        planned(trainer, fit_stores, device_budget="90%", lossy=leave, say=said.append).train()
        firsts.append((losses(trainer)[0], torch.get_rng_state().tolist()))
        alone = [text for text in said if text in (ONE_BATCH, NONE_LIKE_IT)]
        assert bool(alone) == (name == "alone")
        if name == "loader":
            assert found
            assert all(count > 1 for count, _ in found)
    assert firsts[0] == firsts[1]
