"""Turns what a process group raises when ranks are lost into one sentence that names what was waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from stowage.stages.ir.errors import RankError
from stowage.stages.runtime.sharding.watch import Watch

AGAIN = "start all ranks again and go on from the last checkpoint (`step.load`)"
"""What is to be done, unless a group's `Failures` were given something else."""


class Failures:
    """Remembers that the ranks of a group have lost each other: from then on nothing is exchanged any more.

    What one rank sends next would meet what another has been waiting for since the failure.

    Attributes:
        watch: says what takes long.
    """

    def __init__(self, group: Any, rank: int, again: str = AGAIN) -> None:
        """Watch a group; `again` says what is to be done once ranks are lost."""
        self._group = group
        self._rank = rank
        self._again = again
        self._broken = ""
        self.watch = Watch(rank)

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Exchange something inside, or wait for it; `what` names it in errors.

        Raises:
            RankError: another rank has ended, hangs, or has failed.
        """
        if self._broken:
            raise RankError(self._broken)
        try:
            with self.watch.waiting(what):
                yield
        except RuntimeError as error:  # all that process groups raise are kinds of it
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: RuntimeError) -> RankError:
        said = " ".join(str(error).split())
        if "timed out" in said.lower() or "timeout" in said.lower():
            text = (
                f"Rank {self._rank} waited for {what} until the timeout of the process group: another rank hangs, or "
                "does something else; see what the others do, or give init_process_group a longer timeout, then "
            )
        elif "onnection" in said or "peer" in said or "socket" in said:
            text = (
                f"Rank {self._rank} waited for {what} when another rank ended or failed: see what that one said last, "
                "then "
            )
        else:
            text = f"Rank {self._rank} could not exchange {what} with the other ranks ({said[:200]}): "
        self.broken_off(text + self._again + ".")
        return RankError(self._broken)

    def broken_off(self, text: str) -> None:
        """Refuse with this text from now on, and end what other ranks wait for."""
        if not self._broken:
            self._broken = text
            with suppress(RuntimeError, AttributeError):  # the others learn of it at their timeout otherwise
                self._group.abort()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run something that all ranks do in the same order; where it fails, nothing is exchanged any more."""
        try:
            yield
        except BaseException as error:
            said = " ".join(str(error).split())[:200]
            self.broken_off(
                f"A step of rank {self._rank} was broken off ({type(error).__name__}{': ' if said else ''}{said}), so "
                f"ranks no longer do the same: {self._again}."
            )
            raise


def listed(names: Sequence[str]) -> str:
    """Return names of tensors as text, the first few of many."""
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
