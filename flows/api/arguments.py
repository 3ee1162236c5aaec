"""Checks the arguments of `fit` and its relatives before anything begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from stowage.flows.api.steps import NewShapes
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.lossy import Lossy
from stowage.stages.runtime.offload.offloaded_tensor import OffloadedTensor
from stowage.stages.settings.models import is_path

_SHOWN = 60
"""Most characters of a wrong value that an error shows."""


def _is_function(value: Any) -> bool:
    return value is None or callable(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _is_optional_size(value: Any) -> bool:
    return value is None or _is_size(value)


def _is_place(value: Any) -> bool:
    return value is None or (isinstance(value, str | Path) and is_path(str(value)))


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier() and len(value) <= _SHOWN


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1 << 20


def _is_optimizer(value: Any) -> bool:
    return value is None or isinstance(value, torch.optim.Optimizer) or callable(value)


_Rule = tuple[Callable[[Any], bool], str]
_PLACE: _Rule = (_is_place, "the name of a file or folder, or None")
_RULES: dict[str, _Rule] = {
    "model": (lambda value: isinstance(value, nn.Module), "an nn.Module"),
    "optimizer": (_is_optimizer, "a torch.optim.Optimizer, a function that makes one from parameters, or None"),
    "device_budget": (_is_size, "a size such as '900MiB', a percentage such as '50%', or bytes"),
    "host_budget": (_is_optional_size, "a size such as '8GiB', bytes, or None"),
    "disk_budget": (_is_optional_size, "a size such as '8GiB', bytes, or None"),
    "loss": (_is_function, "a function of (outputs, batch), or None"),
    "forward": (_is_function, "a function of (model, batch), or None"),
    "objective": (_is_function, "a function of (model, batch), or None"),
    "resize": (_is_function, "a function of (batch, form), or None"),
    "forms": (lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes), "several batches"),
    "accumulate": (_is_count, "the number of micro-batches of an update, 1 or more"),
    "programs": (_is_count, "how many may be in memory, 1 or more"),
    "method": (_is_word, "the name of a method, 'auto' to have the best"),
    "quick": (lambda value: isinstance(value, bool), "True or False"),
    "lossy": (lambda value: value is None or isinstance(value, Lossy), "a Lossy, such as Lossy(['int8']), or None"),
    "say": (callable, "a function of one text"),
    "new_shapes": (lambda value: value in get_args(NewShapes), f"one of {', '.join(get_args(NewShapes))}"),
    "offload_dir": _PLACE,
    "weights": _PLACE,
    "cache_dir": _PLACE,
}


def check_arguments(names: Mapping[str, str] | None = None, /, **given: Any) -> None:
    """Check the kind of each argument, by its name.

    Args:
        names: the names that errors use, for arguments that have another name where the user gave them.
        given: the arguments.

    Raises:
        ParameterError: an argument is of another kind than it must be.
    """
    for name, value in given.items():
        is_right, what = _RULES[name]
        try:
            right = bool(is_right(value))
        except Exception:  # a value may refuse comparisons
            right = False
        if not right:
            raise ParameterError(f"{(names or {}).get(name, name)} is {_shown(value)}: give {what}.")


def check_objective(loss: object, forward: object) -> None:
    """Check that the loss is given in one way at most.

    Raises:
        ParameterError: both `loss` and `forward` are given.
    """
    if loss is not None and forward is not None:
        raise ParameterError("Pass loss, which takes the model's outputs, or forward, which calls the model; not both.")


def _shown(value: Any) -> str:
    if not isinstance(value, str | int | float | Path | list | tuple | dict | None):
        return f"a {type(value).__name__}"
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def check_at_hand(model: nn.Module) -> None:
    """Check that no earlier step keeps the model's weights elsewhere.

    Raises:
        ParameterError: a parameter is offloaded, or dealt out to ranks.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, OffloadedTensor):
            raise ParameterError(
                f"Parameter '{name}' is {parameter.whereabouts}: a step that was made of this model before keeps it "
                "there. Go on with that step, or make another of a copy: `with step.on_device() as model: other = "
                "copy.deepcopy(model)`."
            )
