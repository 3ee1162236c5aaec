"""`stow` with weights and states on disk: the Trainer logs, evaluates, saves, resumes as the plain one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stowage.stages.device import measure_allocations, unique_bytes
from stowage.stages.ir.errors import OffloadedError
from stowage.stages.runtime.observe.measure import resident_tensors
from tests.configurations.alongside import small_gpt2
from tests.configurations.test_trainer import assert_same_run, logs, planned, rows, trainer_of
from tests.runtime.beside_eager import same

transformers = pytest.importorskip("transformers")

DATA = [*rows(8, 32, 1), *rows(2, 20, 2)]
"""Two whole batches of four, and a partial one with another length."""

TIGHT = "24MiB"
"""Little more than the disk tier's staging and the parameters take: some of these leave, whatever the costs."""

BEST: dict[str, Any] = {
    "max_grad_norm": 0.0,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": False,
}


def model() -> nn.Module:
    """Weights outweigh what the disk tier needs for itself."""
    return small_gpt2(n_embd=256, n_positions=64)


def make(folder: Path, **arguments: Any) -> Any:
    return trainer_of(folder, model(), DATA, per_device_train_batch_size=4, **arguments)


def from_disk(trainer: Any, stores: Path, folder: Path, budget: str = TIGHT) -> Any:
    return planned(trainer, stores, device_budget=budget, method="offmate", offload_dir=folder)


def step_of(trainer: Any) -> Any:
    return trainer.training_step.step


def lower_tier(trainer: Any) -> list[str]:
    """Parameters and states that are not in memory."""
    return sorted(step_of(trainer).programs.offloading.offloaded().values())


def assert_offloaded(trainer: Any) -> None:
    names = lower_tier(trainer)
    assert any("::" in name for name in names)
    assert any("::" not in name for name in names)


def assert_same(trainer: Any, plain: Any, **how: Any) -> None:
    assert_offloaded(trainer)
    with trainer.on_device():
        assert_same_run(trainer, plain, **how)


def logits_metric(prediction: Any) -> dict[str, float]:
    return {"mean_logit": float(prediction.predictions.mean())}


def test_evaluating_saving_and_the_best_model(tmp_path: Path, fit_stores: Path) -> None:
    plain = make(tmp_path / "plain", **BEST)
    plain.train()
    trainer = from_disk(make(tmp_path / "planned", **BEST), fit_stores, tmp_path / "lower_tier")
    trainer.train()
    assert [r["eval_loss"] for r in logs(trainer) if "eval_loss" in r] == [
        r["eval_loss"] for r in logs(plain) if "eval_loss" in r
    ]
    assert step_of(trainer).plan.offload_bytes > 0
    assert step_of(trainer).evaluation.summary.reload_bytes > 0
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-3"), "the best model is not the last one"
    with pytest.raises(OffloadedError, match=r"step\.evaluate"):
        trainer.model(**trainer.data_collator(DATA[:2]))
    assert_same(trainer, plain)
    for checkpoint in ("checkpoint-3", "checkpoint-6"):
        mine, theirs = tmp_path / "planned" / checkpoint, tmp_path / "plain" / checkpoint
        assert {f.name for f in mine.iterdir()} == {f.name for f in theirs.iterdir()}
        assert same(load_file(mine / "model.safetensors"), load_file(theirs / "model.safetensors"))
        states = [torch.load(f / "optimizer.pt", weights_only=True) for f in (mine, theirs)]
        assert same(*states)
    trainer.compute_metrics = plain.compute_metrics = logits_metric
    assert trainer.evaluate()["eval_mean_logit"] == plain.evaluate()["eval_mean_logit"]
    found, expected = trainer.predict(DATA), plain.predict(DATA)
    assert (found.predictions == expected.predictions).all()
    assert (found.label_ids == expected.label_ids).all()
    assert_offloaded(trainer)
    trainer.save_model(str(tmp_path / "alone"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    assert all(same(a.detach(), b.detach()) for a, b in zip(again.parameters(), plain.model.parameters(), strict=True))


def test_saving_keeps_to_the_budget(tmp_path: Path, fit_stores: Path) -> None:
    trainer = from_disk(make(tmp_path, max_grad_norm=0.0, num_train_epochs=1), fit_stores, tmp_path / "lower_tier")
    trainer.train()
    step = step_of(trainer)
    state = sum(t.nbytes for t in resident_tensors(model(), None, ())) * 3
    for work in (trainer._save, trainer._save_optimizer_and_scheduler):
        program = step.contents() and step.programs.known[0].program
        tensors = [*resident_tensors(step.model, step.optimizer, ()), *program.resident()]
        resident = unique_bytes(tensors) + program.staging_bytes
        measured = measure_allocations(lambda work=work: work(str(tmp_path / "files")), tensors)
        peak = resident + measured.peak_bytes
        assert peak <= step.plan.device_budget_bytes, work
        assert peak - program.staging_bytes < state, "else it could all have been in memory"


@pytest.mark.long
def test_resumed_across_plain_and_planned(tmp_path: Path, fit_stores: Path) -> None:
    case = {"max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}
    plain = make(tmp_path / "plain", **case)
    plain.train()
    first = from_disk(make(tmp_path / "planned", **case), fit_stores, tmp_path / "lower_tier")
    first.train()
    assert_same(first, plain)
    second = from_disk(make(tmp_path / "planned", **case), fit_stores, tmp_path / "lower_tier")
    second.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert_same(second, plain, resumed=True)
    third = make(tmp_path / "plain", **case)
    third.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-2"))
    assert_same_run(third, plain, resumed=True)
    first.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-2"))  # with weights and states offloaded
    assert_same(first, plain, resumed=True)


@pytest.mark.long
def test_clipping_and_accumulation(tmp_path: Path, fit_stores: Path) -> None:
    """With the Trainer's default `max_grad_norm` all gradients wait for the last, offloaded if need be."""
    case = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8, "eval_strategy": "epoch"}
    data = [*rows(24, 64, 3), *rows(2, 40, 4)]
    plain = trainer_of(tmp_path / "plain", model(), data, **case)
    plain.train()
    trainer = from_disk(
        trainer_of(tmp_path / "planned", model(), data, **case), fit_stores, tmp_path / "lower_tier", "32MiB"
    )
    trainer.train()
    assert trainer.args.max_grad_norm == 1.0
    plans = [known.planned.summary for known in step_of(trainer).programs.known]
    assert any(plan.offload_bytes > 0 for plan in plans)
    with trainer.on_device():
        assert_same_run(trainer, plain)


@pytest.mark.long
def test_a_second_call_of_train_goes_on(tmp_path: Path, fit_stores: Path) -> None:
    def twice(trainer: Any) -> Any:
        trainer.train()
        trainer.args.weight_decay, trainer.optimizer = 0.1, None  # another optimizer, for the weights where they are
        trainer.train()
        return trainer

    case = {"max_grad_norm": 0.0, "num_train_epochs": 1}
    plain = twice(make(tmp_path / "plain", **case))
    assert_same(twice(from_disk(make(tmp_path / "planned", **case), fit_stores, tmp_path / "lower_tier")), plain)
