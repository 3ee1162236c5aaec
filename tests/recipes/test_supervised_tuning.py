"""TRL's `SFTTrainer` under `stow`, beside the same trainer without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stowage.flows import stow
from tests.matrix import some
from tests.recipes.tiny import language_model
from tests.runtime.beside_eager import differences, same

datasets = pytest.importorskip("datasets", reason="datasets is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")

WORDS = [f"w{number}" for number in range(56)]
TIMES = ("runtime", "per_second", "total_flos", "stowage")
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
CASES: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "LoRA, packing": {"packing": True},
    "LoRA, packing, wrapped": {"packing": True, "packing_strategy": "wrapped"},
    "all weights": {"adapters": False},
    "all weights, packing": {"adapters": False, "packing": True},
    "no checkpointing, accumulation": {"gradient_checkpointing": False, "gradient_accumulation_steps": 2},
    "LoRA, only completions": {"completions": True},
    "LoRA, bfloat16": {"bf16": True},
    "LoRA, evaluation": {"eval_strategy": "steps", "eval_steps": 2},
}


def tokenizer() -> Any:
    """A word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def sentences(count: int, completions: bool) -> Any:
    """Of two lengths."""
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " ".join(WORDS[int(i)] for i in torch.randint(0, len(WORDS), (length,), generator=generator))

    lengths = [(11, 7)[number % 2] for number in range(count)]
    if completions:
        rows = [text(length) for length in lengths]
        return datasets.Dataset.from_dict({"prompt": rows, "completion": [" " + text(5) for _ in lengths]})
    return datasets.Dataset.from_dict({"text": [text(length) for length in lengths]})


def trainer_of(folder: Path, kind: str = "Llama", **arguments: Any) -> Any:
    adapters, completions = arguments.pop("adapters", True), arguments.pop("completions", False)
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "max_length": 24,
        "logging_steps": 1,
        "learning_rate": 2e-2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
    }
    data = sentences(32, completions)
    return trl.SFTTrainer(
        model=language_model(kind, num_hidden_layers=1),
        args=trl.SFTConfig(str(folder), **settings | arguments),
        train_dataset=data,
        eval_dataset=data.select(range(4)) if "eval_strategy" in arguments else None,
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(**LORA) if adapters else None,
    )


def logs(trainer: Any) -> list[dict[str, Any]]:
    """Everything logged, token accuracy and entropy too, without times."""
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in trainer.state.log_history]


@pytest.mark.parametrize("case", some(CASES, ["LoRA, packing"]))
def test_the_numbers_of_the_plain_trainer(case: str, tmp_path: Path, fit_stores: Path) -> None:
    plain = trainer_of(tmp_path / "plain", **CASES[case])
    plain.train()
    random_after = torch.get_rng_state()
    trainer = trainer_of(tmp_path / "planned", **CASES[case])
    stow(trainer, device_budget="120%", cache_dir=fit_stores, quick=True, say=lambda text: None)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert logs(trainer) == logs(plain)
    assert any("mean_token_accuracy" in row for row in logs(trainer))
    assert differences(trainer.model, plain.model) == []
    assert same(trainer.optimizer.state_dict(), plain.optimizer.state_dict())
    assert torch.equal(torch.get_rng_state(), random_after)
    assert [n for n, p in trainer.model.named_parameters() if n in before and torch.equal(p, before[n])] == []
