"""Finds and names the checkpoints of a run: one file for a process alone, two in turn for each of several ranks.

Each rank writes its own shards. A rank may be killed while others have already written the next checkpoint, so each
keeps its last two, and a run continues at the latest iteration that all of them have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stowage.stages.train.checkpoint import saved_iteration


@dataclass
class Checkpoints:
    """The files of one process's checkpoints.

    Attributes:
        paths: the files, to be written in turn.
        latest: the one that training continues from; None where there is none.
    """

    paths: list[Path]
    latest: Path | None = None

    def next(self) -> Path:
        """Return the file to write next, which is `latest` from then on."""
        others = [path for path in self.paths if path != self.latest]
        self.latest = others[0] if others else self.paths[0]
        return self.latest

    def remove(self) -> None:
        """Remove the files of a run that has ended."""
        for path in self.paths:
            path.unlink(missing_ok=True)


def checkpoint_of(folder: Path, name: str, steps: int, iteration: int | None) -> Path:
    """Return the path of the checkpoint of a run of so many steps.

    A checkpoint that a longer run has left at a later iteration is of no use to it, and stays for that run.

    Args:
        folder: the folder of checkpoints.
        name: the name of the run.
        steps: the steps that it takes.
        iteration: the iteration of the checkpoint under its name; None where there is none.
    """
    if iteration is not None and iteration > steps:
        return folder / f"{name}-{steps}.safetensors"
    return folder / f"{name}.safetensors"


def checkpoints_of(
    folder: Path, name: str, steps: int, rank: int, ranks: int, all_of: Callable[[Any], list[Any]]
) -> Checkpoints:
    """Return the checkpoints of a run of so many steps.

    Args:
        folder: the folder of checkpoints.
        name: the name of the run.
        steps: the steps that it takes.
        rank: this process's number.
        ranks: how many processes train together.
        all_of: returns what all of them give.
    """
    names = [name] if ranks == 1 else [f"{name}-rank{rank}of{ranks}-{turn}" for turn in (0, 1)]
    paths = [
        checkpoint_of(folder, own, steps, saved_iteration(checkpoint_of(folder, own, steps, None))) for own in names
    ]
    if ranks == 1:
        return Checkpoints(paths, paths[0])
    found = {iteration: path for path in paths if (iteration := saved_iteration(path)) is not None}
    common = set.intersection(*all_of(set(found)))
    return Checkpoints(paths, found[max(common)] if common else None)
