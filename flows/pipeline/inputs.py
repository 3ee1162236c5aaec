"""Finds the user's files that a run's checkout needs and Git does not bring there."""

from __future__ import annotations

from pathlib import Path

from stowage.stages.inputs import listed_inputs, named_inputs
from stowage.stages.settings import Settings


def input_paths(root: Path, settings: Settings) -> list[str]:
    """Return relative paths of existing files of the user's that `settings` name or that the project lists."""
    groups = [*named_inputs(root, settings).values(), *listed_inputs(root).values()]
    paths = {path for group in groups for path in group if not Path(path).is_absolute()}
    return sorted(path for path in paths if (root / path).exists())
