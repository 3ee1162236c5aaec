"""Ends planning on Ctrl-C with one line: no traceback, nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stowage.flows.planning.progress import Watch

STATUS = 130
"""Exit status that a shell expects of a process that Ctrl-C ended."""


class Interrupted(KeyboardInterrupt, SystemExit):
    """A `KeyboardInterrupt` for those who catch it; Python shows no traceback for it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = STATUS


@contextmanager
def ends_in_one_line(watch: Watch, say: Callable[[str], None]) -> Iterator[None]:
    """End with one line, said by `say`, where Ctrl-C interrupts the block."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        text = (
            f"Stopped while planning ({watch.describe()}): what has been measured and solved is kept, and the next run "
            "goes on from there."
        )
        say(text)
        raise Interrupted(text) from None
