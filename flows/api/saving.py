"""Saves and loads what a `TrainingStep` trains, tensor by tensor, since it may be larger than memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError, PlanMismatchError
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.offload.state_dicts import unguarded
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
        with unguarded():  # peft calls `state_dict` of parts of the model for the names in it
            chosen = contents.together(lambda: _of_adapters(model))
            contents.together(lambda: _write_adapters(folder, contents, chosen))
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


def _of_adapters(model: Any) -> set[int]:
    """Return the identities of the tensors that peft would write of its adapters, such as those of embeddings."""
    from peft import get_peft_model_state_dict

    state = model.state_dict(keep_vars=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say is said when they are written
        picked = [get_peft_model_state_dict(model, state_dict=state, adapter_name=name) for name in model.peft_config]
    return {id(tensor) for adapter in picked for tensor in adapter.values()}


def _write_adapters(folder: Path, contents: Contents, chosen: set[int]) -> None:
    """Let peft write its adapters, with the contents of the chosen tensors in the host's memory."""
    model: Any = contents.model
    state = dict(model.state_dict(keep_vars=True))
    waiting = {name: tensor for name, tensor in state.items() if id(tensor) in chosen}
    state.update({name: t.detach() for name, t in state.items() if isinstance(t, torch.Tensor) and name not in waiting})

    def keep(name: str, content: torch.Tensor) -> None:
        if contents.writes:
            state[name] = content.detach().to("cpu", copy=True)

    try:
        while waiting:
            name = next(iter(waiting))
            contents.lend(waiting.pop(name), partial(keep, name))
        if contents.writes:
            model.save_pretrained(folder, state_dict=state)
    finally:  # also where one has no room: the other ranks go on
        for tensor in waiting.values():
            contents.lend(tensor, lambda content: None)


def save_optimizer_for_torch(path: Path, contents: Contents) -> None:
    """Write the optimizer's `state_dict` as `torch.save` does."""
    contents.settle()
    contents.write_torch(path, contents.optimizer_state())
