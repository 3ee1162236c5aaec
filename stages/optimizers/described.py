"""Describes an optimizer as text that is equal in every process which has made it alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stowage.stages.optimizers.known import class_name
from stowage.stages.optimizers.trial import described
from stowage.stages.optimizers.twin import inner_optimizers

FEW = 16
"""Elements of a tensor among the settings up to which its numbers are written."""


def optimizer_text(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> str:
    """Return classes, settings and parameters of an optimizer, and for how many it has states, in one line each.

    Args:
        optimizer: the optimizer, or one that wraps others.
        names: identity of a parameter -> its name in the model.
    """
    lines = [class_name(optimizer)]
    for number, group in enumerate(optimizer.param_groups):
        settings = sorted((key, value) for key, value in group.items() if key not in ("params", "param_names"))
        lines += [f"{key}={_value(value)} in group {number}" for key, value in settings]
        members = ", ".join(names.get(id(p), "one of another model") for p in group["params"])
        lines.append(f"group {number} of {members}")
    held = sum(bool(state) for o in inner_optimizers(optimizer) for state in o.state.values())
    return "\n".join([*lines, f"states of {held} parameters"])


def _value(item: Any) -> str:
    if isinstance(item, torch.Tensor) and item.numel() <= FEW and not item.is_meta:
        return f"{described(item)} {item.tolist()}"
    return described(item)
