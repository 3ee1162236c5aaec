"""A budget in percent is of the largest batch that was given or seen, evaluation included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import stow
from stowage.stages.ir.errors import Infeasible, ParameterError
from tests.api.test_lengths import Beside, Tagger, batch_of
from tests.configurations.alongside import small_gpt2


def test_it_grows_with_the_batches_and_never_shrinks(fit_stores: Path) -> None:
    beside = Beside(Tagger, fit_stores, 12, device_budget="70%")
    first = beside.step.plan
    assert first.device_budget_bytes == int(0.7 * beside.step.planned.eager_peak_bytes)
    beside.train(30)
    larger = beside.step.plan.device_budget_bytes
    assert larger == int(0.7 * beside.step.planned.eager_peak_bytes) > first.device_budget_bytes
    beside.train(10, 12)
    assert beside.step.plan == first, "what was planned stays"
    beside.train(11)
    assert beside.step.plan.device_budget_bytes == larger
    assert beside.step.plan.method == "keep_all"


def test_an_evaluation_of_longer_batches_counts(fit_stores: Path) -> None:
    beside = Beside(Tagger, fit_stores, 4, device_budget="120%")
    before = beside.step.plan.device_budget_bytes
    beside.other.eval()
    for length in (120, 100):
        assert torch.equal(beside.step.evaluate(batch_of(length)), beside.other(**batch_of(length)))
    assert beside.step.evaluation is not None
    assert beside.step.evaluation.summary.device_budget_bytes > before
    beside.other.train()
    beside.train(4, 5)


def test_in_bytes_it_stays_and_the_refusal_names_mode_and_shape(fit_stores: Path) -> None:
    beside = Beside(Tagger, fit_stores, 4, device_budget=60_000)
    with pytest.raises(Infeasible, match=r"in evaluation with a batch of \(4, 200\)") as caught:
        beside.step.evaluate(batch_of(200))
    assert (caught.value.mode, caught.value.form, caught.value.budget_bytes) == ("evaluation", "(4, 200)", 60_000)
    with pytest.raises(Infeasible, match=r"in training with a batch of \(4, 201\)") as caught:
        beside.step(batch_of(201))
    assert (caught.value.mode, caught.value.form) == ("training", "(4, 201)")
    beside.train(4)


@pytest.mark.parametrize("budget", ["0%", "-3%", "x%"])
def test_no_percentage(budget: str, fit_stores: Path) -> None:
    with pytest.raises(ParameterError, match="percentage"):
        Beside(Tagger, fit_stores, 4, device_budget=budget)


def rows(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    found = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    return [{"input_ids": row, "labels": row.clone()} for row in found]


def trainer_of(folder: Path, evaluated: int, **arguments: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 2, "eval_strategy": "steps",
        "eval_steps": 2, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3,
        "save_strategy": "no", "learning_rate": 1e-2,
    }  # fmt: skip
    return transformers.Trainer(
        small_gpt2(),
        transformers.TrainingArguments(str(folder), **settings | arguments),
        train_dataset=rows([6] * 8),
        eval_dataset=rows([evaluated] * 64),
    )


def test_the_trainer_plans_its_evaluation_before_the_first_step(fit_stores: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"per_device_eval_batch_size": 32}
    plain = trainer_of(tmp_path / "plain", 24, **how)
    plain.train()
    said: list[str] = []
    trainer = stow(
        trainer_of(tmp_path / "stowed", 24, **how),
        device_budget="120%",
        cache_dir=fit_stores,
        quick=True,
        say=said.append,
    )
    trainer.train()
    (evaluation,) = [i for i, s in enumerate(said) if "evaluation, new shape" in s]
    assert [s.startswith("Planned in") for s in said[: evaluation + 1]] == [True] * (evaluation + 1)
    losses = [
        [row[k] for row in t.state.log_history for k in ("loss", "eval_loss") if k in row] for t in (plain, trainer)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    peaks = [row["stowage_peak_MiB"] for row in trainer.state.log_history if "loss" in row]
    assert peaks == [round(trainer.stowage.plan.device_peak_bytes / 2**20, 3)] * 2
    assert "GPT2LMHeadModel" in repr(trainer.stowage)


def test_the_trainer_refuses_before_the_first_step(fit_stores: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 30, per_device_eval_batch_size=64)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    plain = trainer_of(tmp_path, 6)
    stow(plain, device_budget="120%", cache_dir=fit_stores, quick=True, say=lambda _: None).train()
    budget = plain.stowage.plan.device_budget_bytes
    stow(trainer, device_budget=budget, cache_dir=fit_stores, quick=True, say=lambda _: None)
    with pytest.raises(Infeasible, match=r"in evaluation with a batch of \(64, 30\)"):
        trainer.train()
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
