"""Says which exchange with the other ranks a rank has been waiting for, long before the process group gives up.

The timeouts of process groups are minutes, and NCCL's own watchdog, which then ends the process, knows no names.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LONG_S = 60.0
"""Time after which an exchange is named."""

LOOK_S = 2.0
"""Time between two looks."""


def on_screen(text: str) -> None:
    """Write a sentence where errors go."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class _Open:
    """An exchange that has not ended; on a GPU `event` ends with it."""

    what: str
    event: Any = None
    began: float = field(default_factory=time.monotonic)
    is_said: bool = False


class Watch:
    """The exchanges of one rank that are under way; a thread looks after them while there are any."""

    def __init__(
        self, rank: int, *, say: Callable[[str], None] = on_screen, long_s: float = LONG_S, look_s: float = LOOK_S
    ) -> None:
        self._rank, self._say, self._long_s, self._look_s = rank, say, long_s, look_s
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._looks = False

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wait for an exchange inside."""
        number = self._add(_Open(what))
        try:
            yield
        finally:
            self._open.pop(number, None)

    def until(self, event: Any, what: str) -> None:
        """Watch an exchange on a GPU, which does not hold up the process: `event` comes right after it."""
        self._add(_Open(what, event))

    def _add(self, exchange: _Open) -> int:
        number = next(self._numbers)
        with self._lock:
            self._open[number] = exchange
            if not self._looks:
                self._looks = True
                threading.Thread(target=self._look, name="stowage-watch", daemon=True).start()
        return number

    def _goes_on(self) -> bool:
        with self._lock:
            self._looks = bool(self._open)
        return self._looks

    def _look(self) -> None:
        while self._goes_on():
            time.sleep(self._look_s)
            for number, exchange in list(self._open.items()):
                if exchange.event is not None and exchange.event.query():
                    self._open.pop(number, None)
                elif not exchange.is_said and time.monotonic() - exchange.began > self._long_s:
                    exchange.is_said = True
                    self._say(
                        f"Rank {self._rank} has waited {self._long_s:.0f} s for {exchange.what}: another rank is "
                        "slower, hangs, or does something else."
                    )
