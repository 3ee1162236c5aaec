"""Sets parameters for one run, given as dotted keys: `{"solve.device_budget": "900MiB"}`."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.files import write_atomically
from stowage.stages.settings import parse_settings
from stowage.stages.settings.load import parse_yaml, read_parameters

Overrides = Mapping[str, Any]


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse `["solve.device_budget=900MiB"]` into a dictionary; values are YAML.

    Raises:
        ParameterError: an assignment is not `key=value`, or its value is not YAML.
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not (key and equals):
            raise ParameterError(f"--set {assignment!r} is not an assignment: write --set solve.device_budget=900MiB.")
        overrides[key.strip()] = parse_yaml(text, f"--set {key}")
    return overrides


def override(content: Mapping[str, Any], overrides: Overrides, source: str) -> dict[str, Any]:
    """Return `content` of a parameter file with `overrides` set, checked.

    Raises:
        ParameterError: a key does not exist, or a value is wrong.
    """
    changed = copy.deepcopy(dict(content))
    for key, value in overrides.items():
        *sections, name = key.split(".")
        place: Any = changed
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise ParameterError(f"{source}: {key} cannot be set, because a key above it is not a section.")
        place[name] = value
    parse_settings(changed, source)
    return changed


def check(root: Path, overrides: Overrides) -> None:
    """Check the project's parameters with `overrides`.

    Raises:
        ParameterError: one is wrong.
    """
    path = root / "params.yaml"
    override(read_parameters(path), overrides, "params.yaml with overrides" if overrides else "params.yaml")


def rewrite(root: Path, overrides: Overrides) -> None:
    """Set `overrides` in the `params.yaml` of a checkout that belongs to this run alone."""
    path = root / "params.yaml"
    changed = override(read_parameters(path), overrides, "params.yaml with overrides")
    text = io.StringIO()
    YAML(typ="safe").dump(changed, text)
    write_atomically(path, text.getvalue().encode())
