"""Models without weights in memory: parameters stand for tensors in safetensors files until a plan places them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from stowage.stages.ir.errors import ParameterError


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules inside with parameters on the meta device; buffers get their values as always.

    Under `torch.device("meta")` buffers that no file has, such as rotary frequencies, would have no values.
    """

    def without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook: Any = without_memory
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def absent(like: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor with `like`'s shape and dtype in the memory of one number: NaN, or 0 without NaN."""
    filler = float("nan") if like.dtype.is_floating_point or like.dtype.is_complex else 0
    return torch.full((), filler, dtype=like.dtype, device=device).expand(like.shape)


def stand_ins(model: nn.Module, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Replace parameters on the meta device by parameters on `device` without content.

    Returns:
        Name -> the meta tensor with the layout that the parameter will have. Parameters shared by modules stay shared.
    """
    made: dict[int, nn.Parameter] = {}
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(absent(parameter, device), requires_grad=parameter.requires_grad)
                found[f"{prefix}.{name}" if prefix else name] = parameter.detach()
            module._parameters[name] = made[id(parameter)]
    return found


class WeightFiles:
    """Tensors by name, in one safetensors file or in all those of a folder; read one at a time."""

    def __init__(self, path: str | Path) -> None:
        """Read the headers.

        Raises:
            ParameterError: there is no such file or folder, or a file is not in the safetensors format.
        """
        self._path = Path(path)
        self._file: dict[str, Path] = {}
        for file in self._files():
            try:
                with safe_open(file, framework="pt") as opened:
                    self._file.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ParameterError(f"weights: '{file}' is not a readable safetensors file ({error}).") from error

    def _files(self) -> list[Path]:
        if self._path.is_file():
            if self._path.suffix == ".json":
                names = json.loads(self._path.read_text())["weight_map"].values()
                return sorted({self._path.parent / name for name in names})
            return [self._path]
        files = sorted(self._path.glob("*.safetensors")) if self._path.is_dir() else []
        if not files:
            raise ParameterError(
                f"weights: there is no safetensors file at '{self._path}': name a file, or a folder that holds some."
            )
        return files

    def key_of(self, names: Iterable[str], base_prefix: str = "") -> str | None:
        """Return the key of a tensor that a model knows by one of `names`, with or without its base model's prefix."""
        for name in names:
            for key in (name, name.removeprefix(f"{base_prefix}."), f"{base_prefix}.{name}"):
                if key in self._file:
                    return key
        return None

    def read(self, key: str) -> torch.Tensor:
        """Read one tensor into memory of its own; the file's pages do not stay in the page cache."""
        file = self._file[key]
        with safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(key).clone()
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                handle = os.open(file, os.O_RDONLY)
                try:
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(handle)
        return tensor


def keys_of(model: nn.Module, wanted: Mapping[str, torch.Tensor], files: WeightFiles) -> dict[str, str]:
    """Return the key in the files of each parameter, by the parameter's name.

    Raises:
        ParameterError: a tensor is missing; or a buffer is on the meta device and not in the files.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    base_prefix = str(getattr(model, "base_model_prefix", ""))
    found: dict[str, str] = {}
    for name in wanted:
        key = files.key_of(names[id(parameters[name])], base_prefix)
        if key is None:
            raise ParameterError(f"weights: no tensor for parameter '{name}' in the given files.")
        found[name] = key
    return found


def load_buffers(model: nn.Module, files: WeightFiles, device: torch.device | str) -> None:
    """Fill buffers on the meta device from the files.

    Raises:
        ParameterError: a buffer is not in the files: build the model so that it has its values.
    """
    base_prefix = str(getattr(model, "base_model_prefix", ""))
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            path = f"{prefix}.{name}" if prefix else name
            key = files.key_of([path], base_prefix)
            if key is None:
                raise ParameterError(
                    f"weights: buffer '{path}' is on the meta device and not in the files: give it its values before "
                    "fit, for example by building the model with parameters alone on the meta device."
                )
            module._buffers[name] = files.read(key).to(device)
