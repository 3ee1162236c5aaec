"""`stow`: a Hugging Face Trainer under plans logs, saves and resumes what the plain one does, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import MasterWeights, stow
from stowage.stages.ir.errors import MIB, Infeasible, ParameterError
from tests.configurations.alongside import small_gpt2
from tests.matrix import some
from tests.runtime.beside_eager import differences, same

pytest.importorskip("accelerate", reason="the Trainer needs accelerate, which is not installed")
transformers = pytest.importorskip("transformers")

LEFT_OUT = ("runtime", "per_second", "total_flos", "stowage_")
"""What differs from run to run, or is said of plans."""


def rows(count: int, length: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randint(0, 96, (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in found]


EVEN = rows(16, 12, 0)
UNEVEN = [*rows(8, 12, 1), *rows(5, 8, 2)]  # padded lengths differ, and the last batch is partial


def pad(given: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """To the longest row of the batch."""
    length = max(len(r["labels"]) for r in given)

    def column(name: str, value: int) -> torch.Tensor:
        return torch.stack([nn.functional.pad(r[name], (0, length - len(r[name])), value=value) for r in given])

    labels = column("labels", -100)
    return {"input_ids": column("input_ids", 0), "labels": labels, "attention_mask": (labels != -100).long()}


def trainer_of(folder: Path, model: nn.Module, data: Any, kind: Any = None, **arguments: Any) -> Any:
    optimizer = arguments.pop("optimizer", None)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "learning_rate": 2e-2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "save_strategy": "no",
    }
    return (kind or transformers.Trainer)(
        model,
        transformers.TrainingArguments(str(folder), **settings | arguments),
        train_dataset=data,
        eval_dataset=data[:4],
        data_collator=pad,
        optimizers=(optimizer(model) if optimizer else None, None),
    )


def planned(trainer: Any, stores: Path, **options: Any) -> Any:
    keywords: dict[str, Any] = {"device_budget": "120%", "cache_dir": stores, "quick": True, "say": lambda text: None}
    return stow(trainer, **keywords | options)


def logs(trainer: Any) -> list[dict[str, Any]]:
    """Everything logged, without times and what is said of the plan."""
    return [{k: v for k, v in row.items() if not any(t in k for t in LEFT_OUT)} for row in trainer.state.log_history]


def assert_same_run(trainer: Any, plain: Any, *, resumed: bool = False) -> None:
    found, expected = logs(trainer), logs(plain)
    if resumed:  # the Trainer's mean loss is over the steps of its own call
        found, expected = (
            [{k: v for k, v in row.items() if k != "train_loss"} for row in f] for f in (found, expected)
        )
    assert found == expected
    assert differences(trainer.model, plain.model) == []
    assert same(trainer.optimizer.state_dict(), plain.optimizer.state_dict())
    assert all(p.grad is None for p in trainer.model.parameters())


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation, bf16": {"gradient_accumulation_steps": 4, "bf16": True},
    "no clipping, label smoothing": {"max_grad_norm": 0.0, "label_smoothing_factor": 0.1},
    "clipping hard, cosine schedule": {"max_grad_norm": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    "SGD, weight decay, evaluation": {"optim": "sgd", "weight_decay": 0.1, "eval_strategy": "epoch"},
}


ROWS = {"even": EVEN, "uneven": UNEVEN}
RUNS = [(case, "even") for case in CASES] + [(case, "uneven") for case in ("defaults", "accumulation, bf16")]
KEPT = [
    ("accumulation, bf16", "uneven"),
    ("clipping hard, cosine schedule", "even"),
]


@pytest.mark.parametrize(
    ("case", "rows"), some(RUNS, keep=KEPT, exactness=[("clipping hard, cosine schedule", "even")])
)
def test_the_numbers_of_the_plain_trainer(case: str, rows: str, tmp_path: Path, fit_stores: Path) -> None:
    data = ROWS[rows]
    plain = trainer_of(tmp_path / "plain", small_gpt2(), data, **CASES[case])
    expected = plain.train()
    random_after = torch.get_rng_state()
    trainer = planned(trainer_of(tmp_path / "planned", small_gpt2(), data, **CASES[case]), fit_stores)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    found = trainer.train()
    assert found.training_loss == expected.training_loss
    assert_same_run(trainer, plain)
    assert torch.equal(torch.get_rng_state(), random_after)
    assert [n for n, p in trainer.model.named_parameters() if torch.equal(p, before[n])] == []
    steps = [row for row in logs(trainer) if "loss" in row]
    assert len(steps) == trainer.state.global_step
    assert all(row["grad_norm"] > 0 for row in steps)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


def test_within_the_budget_as_predicted(tmp_path: Path, fit_stores: Path) -> None:
    trainer = planned(
        trainer_of(tmp_path, small_gpt2(), EVEN, gradient_accumulation_steps=2, per_device_train_batch_size=4),
        fit_stores,
        device_budget="95%",
        method="rockmate",
    )
    peaks = []
    inner = trainer.training_step

    def watched(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        batch = {"inputs": inputs, "num_items_in_batch": num_items_in_batch, "micro_batches": 2}
        model.train()
        if inner.step is None:
            return inner(model, inputs, num_items_in_batch)
        measured = inner.step.measure(batch, update=trainer.accelerator.sync_gradients)
        if trainer.state.global_step:  # before the first update there are no optimizer states
            peaks.append((measured.peak_bytes, inner.step.plan))
        return torch.tensor(measured.loss)

    trainer.training_step = watched
    trainer.train()
    assert len(peaks) == 6
    for peak, plan in peaks:
        assert peak <= plan.device_budget_bytes
        assert abs(peak - plan.device_peak_bytes) <= max(0.02 * plan.device_peak_bytes, MIB / 64)
    assert any(plan.recomputed_bytes for _, plan in peaks)


@pytest.mark.long
def test_resumed_equals_uninterrupted(tmp_path: Path, fit_stores: Path) -> None:
    case = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    plain = trainer_of(tmp_path / "plain", small_gpt2(), UNEVEN, **case)
    plain.train()
    first = planned(trainer_of(tmp_path / "planned", small_gpt2(), UNEVEN, **case), fit_stores)

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == 4
            return control

    first.add_callback(Stop())
    first.train()
    assert first.state.global_step == 4
    second = planned(trainer_of(tmp_path / "planned", small_gpt2(), UNEVEN, **case), fit_stores)
    second.train(resume_from_checkpoint=True)
    assert_same_run(second, plain, resumed=True)
    last = tmp_path / "planned" / f"checkpoint-{second.state.global_step}"
    theirs = tmp_path / "plain" / last.name
    kept = [json.loads((f / "trainer_state.json").read_text())["log_history"] for f in (last, theirs)]
    strip = [[{k: v for k, v in row.items() if not any(t in k for t in LEFT_OUT)} for row in rows] for rows in kept]
    assert strip[0] == strip[1]
    crossed = planned(trainer_of(tmp_path / "plain", small_gpt2(), UNEVEN, **case), fit_stores)
    crossed.train(resume_from_checkpoint=str(theirs.parent / "checkpoint-2"))
    assert_same_run(crossed, plain, resumed=True)


def test_a_second_call_of_train_goes_on(tmp_path: Path, fit_stores: Path) -> None:
    def twice(trainer: Any) -> Any:
        trainer.train()
        trainer.args.max_grad_norm = 0.1
        trainer.train()
        return trainer

    plain = twice(trainer_of(tmp_path / "plain", small_gpt2(), EVEN, num_train_epochs=1))
    trainer = trainer_of(tmp_path / "planned", small_gpt2(), EVEN, num_train_epochs=1)
    assert_same_run(twice(planned(trainer, fit_stores)), plain)


class OwnLoss(transformers.Trainer):  # type: ignore[misc]
    """With a loss of its own, as many scripts have it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def low_precision(model: nn.Module) -> torch.optim.Optimizer:
    return MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2)


OTHERS = ("a loss of its own", "gradient checkpointing", "master weights", "LoRA")


@pytest.mark.parametrize("what", some(OTHERS, keep=["a loss of its own", "gradient checkpointing"]))
def test_trainers_people_have(what: str, tmp_path: Path, fit_stores: Path) -> None:
    def build(folder: str) -> Any:
        model, kind = small_gpt2(), None
        more: dict[str, Any] = {"gradient_accumulation_steps": 3}
        if what == "a loss of its own":
            kind = OwnLoss
        elif what == "gradient checkpointing":
            more["gradient_checkpointing"] = True
        elif what == "master weights":
            model, more["optimizer"] = model.bfloat16(), low_precision
        else:
            peft = pytest.importorskip("peft", reason="peft is not installed")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                settings = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
                model = peft.get_peft_model(model, settings)
        return trainer_of(tmp_path / folder, model, EVEN, kind, **more)

    plain = build("plain")
    plain.train()
    trainer = planned(build("planned"), fit_stores)
    trainer.train()
    assert_same_run(trainer, plain)


def test_a_budget_that_is_too_small_is_said_before_training(tmp_path: Path, fit_stores: Path) -> None:
    trainer = planned(trainer_of(tmp_path, small_gpt2(), EVEN), fit_stores, device_budget="1KiB")
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with pytest.raises(Infeasible):
        trainer.train()
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


def test_what_is_refused_is_one_sentence(tmp_path: Path, fit_stores: Path) -> None:
    with pytest.raises(ParameterError, match=r"transformers\.Trainer"):
        stow(nn.Linear(2, 2), device_budget="1GiB")
    trainer = planned(trainer_of(tmp_path, small_gpt2(), EVEN), fit_stores)
    with pytest.raises(ParameterError, match="call stow once"):
        planned(trainer, fit_stores)
    compiled = trainer_of(tmp_path, small_gpt2(), EVEN)
    compiled.args.torch_compile = True
    with pytest.raises(ParameterError, match="torch_compile") as caught:
        planned(compiled, fit_stores)
    assert "\n" not in str(caught.value)
