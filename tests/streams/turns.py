"""Threads that take turns: each runs only when it is its turn, until it has to wait for something."""

from __future__ import annotations

import threading
from collections.abc import Callable

HANGS_S = 60.0
"""After so long a turn that does not end is an error; it takes part in nothing else."""


class Ended(BaseException):
    """Thrown into threads that are waiting when nobody will go on with them."""


class Agent:
    """One thread.

    Attributes:
        name: of its lane.
        label: what it is at work on, for people.
        ended: it has returned.
    """

    def __init__(self, name: str, body: Callable[[Agent], None]) -> None:
        self.name = name
        self.label = ""
        self.ended = False
        self.error: BaseException | None = None
        self._may: Callable[[], object] = lambda: True
        self._body = body
        self._stop = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._main, name=name, daemon=True).start()

    def ready(self) -> bool:
        """Whether it can go on."""
        return not self.ended and bool(self._may())

    def resume(self) -> None:
        """Let it go on until it waits or returns."""
        self._go.release()
        if not self._back.acquire(timeout=HANGS_S):
            raise AssertionError(f"{self.name} hangs: it waits for something outside of the model")
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def until(self, may: Callable[[], object]) -> None:
        """In the thread: let others go on until that holds."""
        self._may = may
        self._back.release()
        self._go.acquire()
        if self._stop:
            raise Ended

    def end(self) -> None:
        """Make it return, wherever it waits."""
        if not self.ended:
            self._stop = True
            self.resume()

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._stop:
                self._body(self)
        except Ended:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._back.release()
