"""How the trace writes the update of one parameter."""

from __future__ import annotations

import json
from dataclasses import dataclass

UPDATE = "stowage.update"


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer's class as `module:name`, and the settings of a parameter group as JSON, without learning rates."""

    optimizer: str
    settings: str


def update_arguments(parameter: str, gradient_value: int, rule: UpdateRule) -> str:
    """The `arguments` of an update call."""
    content = {
        "args": [parameter, {"value": gradient_value}],
        "kwargs": {"optimizer": rule.optimizer, "settings": rule.settings},
    }
    return json.dumps(content, separators=(",", ":"))


def updated_parameter(arguments: str) -> tuple[str, UpdateRule]:
    """The parameter and rule of an update call."""
    content = json.loads(arguments)
    return content["args"][0], UpdateRule(content["kwargs"]["optimizer"], content["kwargs"]["settings"])
