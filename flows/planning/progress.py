"""Shows what planning is doing: one live line on a terminal, elsewhere a line a stage in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG = logging.getLogger("stowage")

STAGES = {
    "trace": "tracing the step",
    "profile": "measuring operations",
    "errors": "measuring what fewer bits do to gradients",
    "partition": "cutting the step into blocks",
    "options": "finding schedules of blocks",
    "solve": "choosing the plan",
    "codegen": "writing the step",
}
"""Stage -> what it does, for people."""


class Watch:
    """Receives from planning which stage it is in, and how far it is.

    Attributes:
        stage: the present stage, "" before the first.
        done: parts of the stage that are done.
        total: number of its parts; 0 where they are not counted.
    """

    def __init__(self) -> None:
        self.stage = ""
        self.done = self.total = 0
        self._bar: Progress | None = None
        self._task: Any = None
        self._began = 0.0
        self._reason = ""

    def __call__(self, stage: str) -> None:
        """Note that a stage begins."""
        if stage == self.stage:
            return
        self._leave()
        self.stage, self.done, self.total, self._began = stage, 0, 0, time.perf_counter()
        if self._bar is not None:
            self._bar.reset(self._task, description=self._reason + self.describe(), total=None)
        else:
            LOG.info("planning: %s", self.describe())

    def part(self, done: int, total: int) -> None:
        """Note how many parts of the stage are done, of how many."""
        self.done, self.total = done, total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def describe(self) -> str:
        """Say what planning is doing: `measuring operations, 12 of 60`."""
        counted = f", {self.done:,} of {self.total:,}" if self.total and self._bar is None else ""
        return STAGES.get(self.stage, self.stage or "starting") + counted

    @contextmanager
    def shown(self, reason: str = "") -> Iterator[None]:
        """Show progress while planning runs inside, for a reason; nothing stays on the terminal."""
        self.stage, self._reason = "", f"{reason}: " if reason else ""
        console = Console(stderr=True)
        if not (console.is_terminal and sys.stderr.isatty()):
            if reason:
                LOG.info("planning: %s", reason)
            yield
            self._leave()
            return
        columns = (
            TextColumn("stowage: {task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            self._bar, self._task = bar, bar.add_task(self._reason + "starting", total=None)
            try:
                yield
            finally:
                self._bar = self._task = None

    def _leave(self) -> None:
        if self.stage:
            LOG.debug("planning: %s took %.1f s", self.describe(), time.perf_counter() - self._began)
