"""Saves and loads what a `TrainingStep` trains, tensor by tensor, since it may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError, PlanMismatchError
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.train.checkpoint import MODEL
from stowage.stages.train.restore import open_file


def _distinct(model: nn.Module) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """Map the first name of each persistent tensor in `state_dict` to the tensor and all its names; copy nothing."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            raise ParameterError(f"'{name}' of the model's state is no tensor: safetensors files cannot hold it.")
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return {names[0]: (tensor, names) for tensor, names in found.values()}


def save_model(path: Path, contents: Contents) -> None:
    """Write weights and persistent buffers as safetensors, under the names of `state_dict`; shared ones once.

    `safetensors.torch.load_model` reads it, and so does `load_state_dict(load_file(path), strict=False)`.
    """
    distinct = _distinct(contents.model)
    metadata = {"format": "pt"} | {n: first for first, (_, names) in distinct.items() for n in names[1:]}
    contents.write(path, contents.entries((name, tensor) for name, (tensor, _) in distinct.items()), metadata)


def load_model(path: Path, contents: Contents) -> None:
    """Replace weights and persistent buffers by those of a file.

    Raises:
        ParameterError: there is no file.
        TableError: it is damaged, or holds something else.
        PlanMismatchError: it lacks a tensor, or has one of another shape or dtype.
    """
    contents.together(contents.together(lambda: _checked(path, contents)))


def _checked(path: Path, contents: Contents) -> Callable[[], None]:
    """Check that a file has the model's tensors, and return what loads them."""
    file = open_file(path, MODEL, contents)
    keys: list[tuple[torch.Tensor, str]] = []
    for name, (tensor, names) in _distinct(contents.model).items():
        key = next((n for n in names if n in file.forms), None)
        if key is None:
            raise PlanMismatchError(f"{path} has no tensor '{name}': it is of another model.")
        form = file.forms[key]
        if (form.shape, form.dtype) != (tensor.shape, tensor.dtype):
            raise PlanMismatchError(
                f"{path}: '{key}' is {form.dtype} of shape {tuple(form.shape)}, the model's {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}: it is of another model."
            )
        keys.append((tensor, key))

    def load() -> None:
        for tensor, key in keys:
            contents.replace(tensor, file, key)

    return load


def save_pretrained(folder: Path, contents: Contents) -> None:
    """Write what `save_pretrained` of a `transformers` or `peft` model writes.

    That is the configuration and `model.safetensors`; of a `peft` model its adapters.

    Raises:
        ParameterError: the model is of neither kind.
    """
    model: Any = contents.model
    if hasattr(model, "peft_config"):
        state: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.requires_grad:

                def keep(content: torch.Tensor, name: str = name) -> None:
                    state[name] = content.clone()

                contents.lend(tensor, keep)
            else:
                state[name] = tensor.detach()
        if contents.writes:
            model.save_pretrained(folder, state_dict=state)
        return
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise ParameterError(f"{type(model).__name__} has no save_pretrained: use save_model.")

    def configure() -> None:
        if contents.writes:
            model.config.save_pretrained(folder)
        if contents.writes and getattr(model, "can_generate", bool)() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)

    contents.together(configure)
    save_model(folder / "model.safetensors", contents)


def save_optimizer_for_torch(path: Path, contents: Contents) -> None:
    """Write the optimizer's `state_dict` as `torch.save` does."""
    contents.settle()
    contents.write_torch(path, contents.optimizer_state())
