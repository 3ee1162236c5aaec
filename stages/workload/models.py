"""Builds a model in training mode, with random weights under a seed or weights from a local directory.

It has one of three sources: an architecture of `transformers` by name, a directory in its format, or the user's
`module:function` that returns `(model, sample_batch)`. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from stowage.stages.ir.errors import ParameterError
from stowage.stages.workload.guard import user_code
from stowage.stages.workload.randomness import seeded
from stowage.stages.workload.samples import Batch, sample_batch

log = logging.getLogger("stowage.workload")

# In order of preference: BERT is listed as a causal model too, Whisper's decoder also.
_HEADS = (
    ("SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM"),
    ("SPEECH_SEQ_2_SEQ", "AutoModelForSpeechSeq2Seq"),
    ("IMAGE_CLASSIFICATION", "AutoModelForImageClassification"),
    ("MASKED_LM", "AutoModelForMaskedLM"),
    ("CAUSAL_LM", "AutoModelForCausalLM"),
)
_TRUNCATED = "_no_grad_trunc_normal_"


@dataclass(frozen=True)
class Workload:
    """A model and the batch that its step is traced with."""

    model: nn.Module
    batch: Batch


def build_workload(
    architecture: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
    callable: str | None = None,
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    fake: bool = False,
) -> Workload:
    """Build the model and a batch for it; the user's function brings its own batch.

    See `build_model` and `sample_batch`.
    """
    model, batch = _build(architecture, overrides, directory, callable, seed, fake)
    return Workload(model, sample_batch(model, batch_size, sequence_length, seed) if batch is None else batch)


def build_model(
    architecture: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
    callable: str | None = None,
    *,
    seed: int,
    fake: bool = False,
) -> nn.Module:
    """Build a model in training mode.

    Args:
        architecture: a model type of `transformers` (`gpt2`, `llama`, …); weights are random.
        overrides: settings of its configuration (`n_layer: 12`); `use_cache` is off unless set here.
        directory: a folder with `config.json` and safetensors weights.
        callable: `module:function`, called without arguments, returns `(model, sample_batch)`.
        seed: the same seed gives the same weights; global generators are left as they were.
        fake: build on fake tensors, under the active `FakeTensorMode` or a new one: shapes without memory. Weights of
            a directory are not read.

    Raises:
        ParameterError: not exactly one source, or one that cannot be built.
    """
    return _build(architecture, overrides, directory, callable, seed, fake)[0]


def _build(
    architecture: str | None,
    overrides: Mapping[str, Any] | None,
    directory: str | Path | None,
    function: str | None,
    seed: int,
    fake: bool,
) -> tuple[nn.Module, Batch | None]:
    given = {"architecture": architecture, "directory": directory, "callable": function}
    sources = [name for name, value in given.items() if value]
    if len(sources) != 1:
        raise ParameterError(
            f"trace.model names {' and '.join(sources) or 'no model'}: "
            "give exactly one of architecture, directory, callable."
        )
    if overrides and not architecture:
        raise ParameterError(f"trace.model.overrides goes with architecture, not with {sources[0]}: remove it.")
    with seeded(seed), _fake_mode(fake):
        batch: Batch | None = None
        if architecture:
            config = _config_of(architecture, overrides or {})
            model = _from_config(config, f"trace.model.architecture {architecture!r}")
        elif directory:
            model = _from_directory(Path(directory), fake)
        else:
            assert function is not None
            model, batch = _from_callable(function)
        return model.train(), batch


@contextlib.contextmanager
def _fake_mode(fake: bool) -> Iterator[None]:
    if not fake and active_fake_mode() is None:
        yield
        return
    # Truncated normals are redrawn until all values fit; fake weights have no values.
    original = getattr(nn.init, _TRUNCATED, None)
    if original is not None:
        setattr(nn.init, _TRUNCATED, lambda tensor, *_, **__: tensor)
    try:
        with FakeTensorMode() if active_fake_mode() is None else contextlib.nullcontext():
            yield
    finally:
        if original is not None:
            setattr(nn.init, _TRUNCATED, original)


def _config_of(architecture: str, overrides: Mapping[str, Any]) -> Any:
    try:
        default = AutoConfig.for_model(architecture)
    except (ValueError, KeyError):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        hint = _nearest(architecture, CONFIG_MAPPING)
        raise ParameterError(
            f"trace.model.architecture {architecture!r} is not a model type of transformers{hint}."
        ) from None
    for key in overrides:
        if not hasattr(default, key):
            known = [*default.to_dict(), *getattr(default, "attribute_map", {})]
            raise ParameterError(
                f"trace.model.overrides.{key} is not a setting of {architecture}{_nearest(key, known)}."
            )
    try:
        config = AutoConfig.for_model(architecture, **_special_tokens(default, overrides), **overrides)
    except Exception as error:
        raise ParameterError(f"trace.model.overrides does not fit {architecture}: {_first_line(error)}") from error
    return _for_training(config, set(overrides))


def _special_tokens(default: Any, overrides: Mapping[str, Any]) -> dict[str, None]:
    """Switch off special tokens of the default vocabulary that a smaller vocabulary does not have."""
    size = overrides.get("vocab_size")
    if not isinstance(size, int):
        return {}
    names = {"bos_token_id", "eos_token_id", "pad_token_id"} - set(overrides)
    return {n: None for n in sorted(names) if isinstance(i := getattr(default, n, None), int) and i >= size}


def _for_training(config: Any, chosen: set[str]) -> Any:
    """Set what only generation needs, and what the model would otherwise set during its first forward."""
    if hasattr(config, "use_cache") and "use_cache" not in chosen:
        config.use_cache = False
    if _head(config) == "AutoModelForImageClassification" and getattr(config, "problem_type", None) is None:
        config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _head(config: Any) -> str | None:
    """Return the Auto class for the class in the config's `architectures`, else the first that supports it."""
    supported = [
        (auto, getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING")[type(config)])
        for mapping, auto in _HEADS
        if type(config) in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING")
    ]
    named = set(getattr(config, "architectures", None) or ())
    for auto, classes in supported:
        names = {c.__name__ for c in (classes if isinstance(classes, (tuple, list)) else (classes,))}
        if names & named:
            return auto
    return supported[0][0] if supported else None


def _auto_class(config: Any, what: str) -> Any:
    head = _head(config)
    if head is None:
        raise ParameterError(
            f"{what} has no model class with a loss that a batch can be made for: "
            "write a function that returns (model, sample_batch) and name it in trace.model.callable."
        )
    return getattr(modeling_auto, head)


def _from_config(config: Any, what: str) -> nn.Module:
    auto = _auto_class(config, what)
    try:
        model: nn.Module = auto.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ParameterError(f"{what} cannot be built with these overrides: {_first_line(error)}") from error
    return model


def _from_directory(directory: Path, fake: bool) -> nn.Module:
    if not directory.is_dir():
        raise ParameterError(
            f"trace.model.directory {directory} does not exist: give a folder with config.json and weights."
        )
    if not (directory / "config.json").is_file():
        raise ParameterError(
            f"{directory / 'config.json'} is missing: trace.model.directory must hold the model's configuration."
        )
    try:
        found = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config = _for_training(found, set())
    except Exception as error:
        if _brings_code(directory / "config.json"):
            raise ParameterError(
                f"{directory / 'config.json'} names code of its own (auto_map), which is never run: import the model's "
                "class in a function of yours, and name that in trace.model.callable."
            ) from error
        raise ParameterError(f"{directory / 'config.json'} cannot be used: {_first_line(error)}") from error
    if fake:
        return _from_config(config, f"trace.model.directory {directory}")
    _require_weights(directory)
    auto = _auto_class(config, f"trace.model.directory {directory}")
    try:
        model, loading = auto.from_pretrained(
            directory,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:
        raise ParameterError(f"The weights in {directory} cannot be loaded: {_first_line(error)}") from error
    if missing := sorted(loading["missing_keys"]):
        log.warning("%s has no weights for %s: drawn at random under the seed", directory, ", ".join(missing[:5]))
    built: nn.Module = model
    return built


def _brings_code(path: Path) -> bool:
    try:
        return "auto_map" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _require_weights(directory: Path) -> None:
    """Refuse a directory in which a safetensors file is missing."""
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ParameterError(f"{index} is damaged and cannot be read: copy the model's folder again.") from error
    for name in names:
        if not (directory / name).is_file():
            raise ParameterError(
                f"The weights file {directory / name} is missing: put it there, or name the architecture in "
                "trace.model.architecture to start from random weights (only safetensors files are read)."
            )


def _from_callable(path: str) -> tuple[nn.Module, Batch]:
    function = resolve(path, "trace.model.callable")
    with user_code(f"trace.model.callable {path!r}"):
        made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ParameterError(
            f"trace.model.callable {path!r} must return (model, sample_batch), not {type(made).__name__}."
        )
    model, batch = made
    if not isinstance(batch, Mapping):
        raise ParameterError(
            f"trace.model.callable {path!r} must return its sample batch as a dictionary of keyword arguments of the "
            f"model, not {type(batch).__name__}."
        )
    return model, dict(batch)


def resolve(path: str, key: str) -> Any:
    """Return the function that `module:function` names; `key` is the parameter, for the message.

    Raises:
        ParameterError: the path has no colon, the module cannot be imported or ends the process, or it has no such
            function.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ParameterError(f"{key} {path!r} must be written as module:function.")
    with user_code(f"{key} {path!r}: module {module_name} cannot be imported, and"):
        found = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ParameterError(f"{key} {path!r}: module {module_name} has no {name}.")
        found = getattr(found, part)
    if not callable(found):
        raise ParameterError(f"{key} {path!r} is not a function.")
    return found


def vocabulary_size(model: nn.Module) -> int | None:
    """Return the number of token ids that the model accepts, None when its configuration does not say."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of all distinct parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def move(model: nn.Module, device: torch.device | str) -> None:
    """Move parameters and buffers; `Module.to` refuses fake ones, whose tensors it cannot swap."""
    if not is_fake(model):
        model.to(device)
        return
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    there = tensor.detach().to(device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
                tensors[name] = moved[id(tensor)]  # type: ignore[assignment]


def is_fake(model: nn.Module) -> bool:
    """Say whether the model has shapes but no memory."""
    return any(isinstance(t, torch._subclasses.FakeTensor) for t in model.parameters())


def _nearest(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
