"""Models by architecture, directory and function: reproducible, local only, and with errors that name the parameter."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from stowage.stages.ir.errors import ParameterError
from stowage.stages.workload.calls import loss_of
from stowage.stages.workload.data import token_stream
from stowage.stages.workload.models import (
    build_model,
    build_workload,
    is_fake,
    parameter_bytes,
    resolve,
    vocabulary_size,
)
from stowage.stages.workload.samples import sample_batch

TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 64}
LLAMA_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


def user_workload() -> tuple[nn.Module, dict[str, Any]]:
    """What `trace.model.callable` names in these tests."""
    return nn.Linear(3, 2), {"input": torch.randn(4, 3)}


def not_a_workload() -> int:
    return 3


def listed_batch() -> tuple[nn.Module, list[int]]:
    return nn.Linear(1, 1), [1]


def test_same_seed_same_weights_and_global_generators_untouched() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    one, again, other = (build_model("gpt2", TINY, seed=s) for s in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), again.state_dict().values()))
    assert not torch.equal(one.get_parameter("transformer.wte.weight"), other.get_parameter("transformer.wte.weight"))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert one.training
    assert one.config.use_cache is False  # type: ignore[union-attr]


def test_user_function_keeps_its_own_choice_of_generators() -> None:
    state = torch.get_rng_state()
    first, second = (
        build_workload(callable=f"{__name__}:user_workload", batch_size=1, sequence_length=1, seed=5) for _ in "ab"
    )
    assert torch.equal(first.batch["input"], second.batch["input"])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("architecture", "overrides", "expected"),
    [
        ("gpt2", TINY, "GPT2LMHeadModel"),
        ("bert", {"num_hidden_layers": 1}, "BertForMaskedLM"),
        ("vit", {"num_hidden_layers": 1}, "ViTForImageClassification"),
        ("resnet", {}, "ResNetForImageClassification"),
        ("t5", {"num_layers": 1}, "T5ForConditionalGeneration"),
        ("whisper", {"encoder_layers": 1, "decoder_layers": 1}, "WhisperForConditionalGeneration"),
    ],
)
def test_head_with_a_loss_and_its_batch(architecture: str, overrides: dict[str, Any], expected: str) -> None:
    made = build_workload(architecture, overrides, batch_size=2, sequence_length=16, seed=0, fake=True)
    assert type(made.model).__name__ == expected
    with next(made.model.parameters()).fake_mode:  # type: ignore[attr-defined]
        assert made.model(**made.batch).loss.shape == ()


def test_llama_7b_has_shapes_but_no_memory() -> None:
    made = build_workload("llama", LLAMA_7B, batch_size=4, sequence_length=512, seed=0, fake=True)
    assert is_fake(made.model)
    assert parameter_bytes(made.model) == 4 * 6_738_415_616
    assert isinstance(made.batch["input_ids"], FakeTensor)
    assert vocabulary_size(made.model) == 32000


def test_an_outer_fake_mode_is_used() -> None:
    with FakeTensorMode() as mode:
        model = build_model("gpt2", TINY, seed=0)
        batch = sample_batch(model, 2, 8, 0)
    assert next(model.parameters()).fake_mode is mode  # type: ignore[attr-defined]
    assert batch["labels"].fake_mode is mode


def test_directory_round_trip(tmp_path: Path) -> None:
    model = build_model("gpt2", TINY, seed=1)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = build_model(directory=tmp_path, seed=2)
    assert loaded.training
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values()))
    assert is_fake(build_model(directory=tmp_path, seed=2, fake=True))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ParameterError, match="cannot be loaded"):
        build_model(directory=tmp_path, seed=2)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ParameterError, match=r"weights file .*model\.safetensors is missing"):
        build_model(directory=tmp_path, seed=2)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    with pytest.raises(ParameterError, match=r"part-1\.safetensors is missing"):
        build_model(directory=tmp_path, seed=2)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ParameterError, match=r"config\.json is missing"):
        build_model(directory=tmp_path, seed=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no model"),
        ({"architecture": "gpt2", "directory": "x"}, "exactly one"),
        ({"architecture": "gtp2"}, "did you mean gpt2"),
        ({"architecture": "gpt2", "overrides": {"n_layr": 2}}, r"overrides\.n_layr .*did you mean n_layer"),
        ({"architecture": "gpt2", "overrides": {"n_head": 5}}, "divisible"),
        ({"architecture": "gpt2", "overrides": {"n_head": "many"}}, "does not fit gpt2"),
        ({"directory": "nowhere"}, "nowhere does not exist"),
        ({"directory": ".", "overrides": {"n_layer": 2}}, "overrides goes with architecture"),
        ({"callable": "no_colon"}, "module:function"),
        ({"callable": "no_such_module_here:f"}, "cannot be imported"),
        ({"callable": "math:no_such"}, "has no no_such"),
        ({"callable": "math:pi"}, "not a function"),
        ({"callable": f"{__name__}:not_a_workload"}, "must return"),
        ({"callable": f"{__name__}:listed_batch"}, "dictionary"),
    ],
)
def test_errors_name_the_parameter(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_model(**arguments, seed=0)


def test_batches_that_a_model_cannot_take() -> None:
    model = build_model("gpt2", TINY, seed=0)
    with pytest.raises(ParameterError, match="16 tokens only"):
        sample_batch(model, 2, 17, 0)
    with pytest.raises(ParameterError, match="batch_size is 0"):
        sample_batch(model, 0, 8, 0)
    with pytest.raises(ParameterError, match=r"trace\.model\.callable"):
        sample_batch(nn.Linear(2, 2), 1, 1, 0)


def test_sample_batch_is_a_function_of_the_seed() -> None:
    model = build_model("gpt2", TINY, seed=0)
    a, b, c = (sample_batch(model, 2, 8, s)["input_ids"] for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_resolve_finds_nested_names() -> None:
    assert resolve("pathlib:Path.cwd", "trace.loss")() == Path.cwd()


def test_code_beside_a_configuration_is_never_run_nor_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the hub calls remote code."""
    ran = tmp_path / "ran"
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    content = {"auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    (tmp_path / "config.json").write_text(json.dumps(content | {"model_type": "theirs"}))
    with pytest.raises(ParameterError, match="names code of its own"):
        build_model(directory=tmp_path, seed=0, fake=True)
    (tmp_path / "config.json").write_text(json.dumps(content | GPT2_CONFIG))
    assert type(build_model(directory=tmp_path, seed=0, fake=True)).__name__ == "GPT2LMHeadModel"
    assert not ran.exists()
    assert "trust_remote_code" not in capsys.readouterr().out


def test_nor_beside_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nclass Tokens: pass\n")
    content = {"auto_map": {"AutoTokenizer": ["theirs.Tokens", None]}, "tokenizer_class": "Tokens"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    with pytest.raises(ParameterError, match="cannot be loaded") as caught:
        token_stream("pydoc_topics", tokenizer=tmp_path)
    assert "\n" not in str(caught.value)
    assert not ran.exists()


GPT2_CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}


@pytest.mark.parametrize("content", ["", "[]", "{", "null", '{"model_type": 3}', '{"model_type": "gpt2", "n_head": 0}'])
def test_a_configuration_that_is_none_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ParameterError, match=str(tmp_path)) as caught:
        build_model(directory=tmp_path, seed=0, fake=True)
    assert "\n" not in str(caught.value)


def test_a_loss_in_a_mapping_is_the_loss() -> None:
    loss = torch.zeros((), requires_grad=True)
    assert loss_of({"loss": loss, "logits": torch.zeros(3)}, None, None) is loss
