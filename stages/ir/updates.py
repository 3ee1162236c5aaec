"""Writes and reads the calls that happen to gradients: additions, clipping by global norm, updates.

    aten.add_(waiting, gradient)          a later micro-batch's gradient is added to the one that waits
    norm = aten._foreach_norm([gradient]) one for each gradient, as soon as it is complete
    scale = stowage.clip([norm, ...])     once all norms exist; waits for the last gradient
    stowage.update(parameter, gradient, scale)   scales the gradient, updates the parameter; the gradient is freed after

Without clipping there are no norms and no scale, and an update only waits for its own gradient. An optimizer that does
not update each tensor by itself has one update for all:

    stowage.update_all([gradient, ...], [parameter, ...], scale)   waits for the last gradient; one `optimizer.step()`
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.ir.collectives import SCATTER
from stowage.stages.ir.trace import Call, TraceTables

UPDATE = "stowage.update"
UPDATE_ALL = "stowage.update_all"
CLIP = "stowage.clip"
ADD = "aten.add_.Tensor"
NORM = "aten._foreach_norm.Scalar"
SCALE = "aten.mul_.Tensor"


_GRADIENT = "::.grad"


def gradient_slot(parameter: str) -> str:
    """Return the name of a waiting gradient's slot in the lower tier; no optimizer state has such a name."""
    return parameter + _GRADIENT


def is_gradient_slot(name: str) -> bool:
    """Say whether `gradient_slot` made that name."""
    return name.endswith(_GRADIENT)


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer's class as `module:name`, and the settings of a parameter group as JSON, without learning rates."""

    optimizer: str
    settings: str


def update_arguments(parameter: str, gradient_value: int, rule: UpdateRule, scale_value: int = -1) -> str:
    """Return the `arguments` of an update call; a scale of -1 means that the gradient is not scaled."""
    scale = [{"value": scale_value}] if scale_value >= 0 else []
    content = {
        "args": [parameter, {"value": gradient_value}, *scale],
        "kwargs": {"optimizer": rule.optimizer, "settings": rule.settings},
    }
    return json.dumps(content, separators=(",", ":"))


def updated_parameter(arguments: str) -> tuple[str, UpdateRule]:
    """Return the parameter and rule of an update call."""
    content = json.loads(arguments)
    return content["args"][0], UpdateRule(content["kwargs"]["optimizer"], content["kwargs"]["settings"])


def joint_arguments(gradients: Mapping[str, int], optimizer: str, rules: str, scale_value: int = -1) -> str:
    """Return the `arguments` of one update of all parameters: their names, each with the value of its gradient."""
    scale = [{"value": scale_value}] if scale_value >= 0 else []
    content = {
        "args": [list(gradients), [{"value": v} for v in gradients.values()], *scale],
        "kwargs": {"optimizer": optimizer, "settings": rules},
    }
    return json.dumps(content, separators=(",", ":"))


def jointly_updated(arguments: str) -> dict[str, int]:
    """Return the gradient's value for each parameter's name, from the arguments of an update of all."""
    names, gradients, *_ = json.loads(arguments)["args"]
    return {name: gradient["value"] for name, gradient in zip(names, gradients, strict=True)}


def clip_arguments(norm_values: Sequence[int], max_norm: float) -> str:
    """Return the `arguments` of a clip call."""
    limit = max_norm if math.isfinite(max_norm) else {"float": str(max_norm)}
    content = {"args": [[{"value": v} for v in norm_values], limit], "kwargs": {}}
    return json.dumps(content, separators=(",", ":"))


def left_behind(trace: TraceTables) -> frozenset[int]:
    """Return values that are in memory after the step: the loss, gradients that stay, and the scale that clips these.

    For a forward alone these are its outputs.
    """
    if trace.meta.outputs:
        return frozenset(trace.meta.outputs)
    taken = taken_gradients(trace.calls)
    stays = {g.gradient_value for g in trace.gradients if g.gradient_value >= 0} - taken
    scales = {v for c in trace.calls if c.target == CLIP for v in c.returns} if stays else set()
    return frozenset(stays | scales | {trace.meta.loss_value})


def taken_gradients(calls: Iterable[Call]) -> frozenset[int]:
    """Return gradient values that an update, an addition or a scatter takes, so that they do not outlive the step."""
    taken: set[int] = set()
    for call in calls:
        if call.phase == "update" and call.target in (ADD, UPDATE):
            taken.add(call.reads[1] if call.target == ADD else call.reads[0])
        elif call.target == UPDATE_ALL:
            taken.update(jointly_updated(call.arguments).values())
        elif call.target == SCATTER:
            taken.update(call.reads)
    return frozenset(taken)


def pinned(trace: TraceTables) -> frozenset[int]:
    """Return storages that are never transferred.

    These are parameters and states that an update of all needs on the device at once, storages in the host, and memory
    that several parameters share (an LSTM's on a GPU): offloading one of them would release nothing of it.
    """
    at_once = {s for call in trace.calls if call.target == UPDATE_ALL for s in call.mutates}
    owners: dict[int, set[str]] = {}
    for value in trace.values:
        if value.source.startswith("parameter:"):
            owners.setdefault(value.storage, set()).add(value.source)
    shared = {storage for storage, names in owners.items() if len(names) > 1}
    return frozenset(at_once | shared | {v.storage for v in trace.values if v.on_host})


_NESTED = "::"


def state_name(parameter: str, key: str, path: str) -> str:
    """Name a storage that an optimizer keeps for a parameter, or for none ("").

    Args:
        parameter: the parameter's name.
        key: key in the parameter's state, if the storage is that of one tensor there, which can be offloaded.
        path: where it was found otherwise.
    """
    return f"{parameter}::{key}" if key else f"{parameter}::{path}{_NESTED}"


def can_move(name: str) -> bool:
    """Say whether the parameter or state of that name can be offloaded."""
    return not name.endswith(_NESTED)
