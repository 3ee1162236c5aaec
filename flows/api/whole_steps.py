"""Delays Ctrl-C inside a step until the step has ended: half of one would leave tensors of two iterations."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stowage.flows.api.interrupt import Interrupted
from stowage.stages.runtime import Program

WAITING = "Ctrl-C: the step under way is finished first; once more breaks it off."


@contextmanager
def whole_step(program: Program, say: Callable[[str], None]) -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, and let a second one break the block off.

    Python runs signal handlers in the main thread alone, so elsewhere, or where nobody handles Ctrl-C, nothing is
    delayed.

    Raises:
        Interrupted: at the second Ctrl-C; its text says what state the model is in.
    """
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    heard: list[Any] = []

    def hear(number: int, frame: Any) -> None:
        if heard:
            text = broken_text(program)
            say(text)
            raise Interrupted(text)
        heard.append(frame)
        say(WAITING)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hear:  # else the block has installed a handler of its own
            signal.signal(signal.SIGINT, before)
    if heard:
        before(signal.SIGINT, heard[0])


def broken_text(program: Program) -> str:
    """Say what state the model is in, in the middle of a step."""
    updated, every = len(program.updated), len(program.updates.names()) if program.updates is not None else 0
    if not updated:
        state = "no parameter has been updated yet, but buffers, generators and gradients may be of the broken step"
    elif updated < every:
        state = f"{updated} of {every} parameters are of the broken step and the others of the one before"
    else:
        state = "all parameters have been updated, but what follows their updates may be missing"
    return f"The step was broken off: {state}; go back to what was saved before (`step.load`)."
