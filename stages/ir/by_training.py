"""The operators that compute by what trains, as plain PyTorch does.

Their last arguments are: how they lay out their results, but for the product itself; the parameters that decide, as a
list; and whether one of those trains.
"""

from __future__ import annotations

import json

_IN_ONE_WAY = "stowage.matmul.default"

BY_TRAINING = frozenset(
    {
        _IN_ONE_WAY,
        "stowage.matmul_input_gradient.default",
        "stowage.attention.default",
        "stowage.attention_gradients.default",
    }
)


def deciders_of(arguments: str) -> list[int]:
    """Return the values of the parameters that decide, from the arguments of a call of such an operator."""
    return [decider["value"] for decider in json.loads(arguments)["args"][-2]]


def lies_by_training(target: str, arguments: str) -> bool:
    """Say whether the strides of a call's results depend on what trains, and are then not those in the tables."""
    if target not in BY_TRAINING or target == _IN_ONE_WAY:
        return False
    own = json.loads(arguments)["args"][-3]
    return any(own) if isinstance(own, list) else bool(own)
