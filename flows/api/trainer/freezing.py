"""Keeps in a Trainer's checkpoints what chooses the units that train, where `stow` was told to freeze."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.errors import PlanMismatchError, TableError
from stowage.stages.ir.files import write_atomically

FILE = "freezing.json"


class FrozenFiles:
    """Writes and reads the state of what chooses, beside the Trainer's own files."""

    def __init__(self) -> None:
        self._state: Mapping[str, Any] | None = None

    def save(self, folder: Path, step: TrainingStep | None) -> None:
        """Write the state, if the step freezes and has been planned."""
        frozen = step.frozen if step is not None else None
        state = frozen.state_dict() if frozen is not None and frozen.writes else None
        if state is not None:
            write_atomically(folder / FILE, json.dumps(state).encode())

    def load(self, folder: Path, step: TrainingStep | None) -> None:
        """Read the state, for a step that may be made later.

        Raises:
            TableError: the file is damaged.
        """
        path = folder / FILE
        if not path.is_file():
            return
        try:
            self._state = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise TableError(f"{path} is damaged: give another checkpoint.") from error
        if step is not None:
            self.bring(step)

    def bring(self, step: TrainingStep) -> None:
        """Hand over the state that was read.

        Raises:
            PlanMismatchError: the step freezes nothing, or by another policy.
        """
        state, self._state = self._state, None
        if state is None:
            return
        if step.frozen is None:
            raise PlanMismatchError("The checkpoint was saved by a run with `freeze`: give stow the same.")
        try:
            step.frozen.load_state_dict(state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TableError(f"{FILE} of the checkpoint is damaged: give another checkpoint.") from error
