"""Notices code that seeds PyTorch's random generator, or puts it back, while a step is traced."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stowage.stages.ir.errors import TraceError

_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))) + os.sep


class _Watched:
    """Stands for the generator in `torch.random`, whose functions all seed and restore it."""

    def __init__(self, place: Callable[[], str], draws: Callable[[], int]) -> None:
        self._place = place
        self._draws = draws
        self._given: list[tuple[torch.Tensor, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = torch.default_generator.get_state()
        self._given.append((state, self._draws()))
        return state

    def set_state(self, state: torch.Tensor) -> Any:
        before = next((draws for given, draws in self._given if given is state), -1)
        if not _for_us() and (before != self._draws() or not _is_current(state)):
            raise _refusal(self._place())
        return torch.default_generator.set_state(state)

    def manual_seed(self, seed: int) -> Any:
        raise _refusal(self._place())

    def seed(self) -> int:
        raise _refusal(self._place())


def _refusal(place: str) -> TraceError:
    """Return the error that something seeds the generator or puts it back."""
    return TraceError(
        f"{place} seeds PyTorch's random generator or puts it back (torch.manual_seed, torch.set_rng_state, "
        "torch.random.fork_rng), which a planned step would not do again: draw such numbers before the step, and pass "
        "them in the batch or keep them in a buffer."
    )


@contextmanager
def nothing_seeded(place: Callable[[], str], draws: Callable[[], int]) -> Iterator[None]:
    """Refuse code that changes the generator of the CPU otherwise than by drawing from it.

    Nothing is drawn while a step is traced, so its state says nothing about draws: whoever puts back a state is refused
    where random calls were recorded since it was taken.

    Args:
        place: returns the module and line that run now.
        draws: returns how many random calls were recorded so far.

    Raises:
        TraceError: the generator is seeded, or put back behind random calls.
    """
    namespace = vars(torch.random)
    watched, before, state = _Watched(place, draws), namespace["default_generator"], torch.get_rng_state()
    namespace["default_generator"] = watched
    try:
        yield
    finally:
        namespace["default_generator"] = before
    if not _is_current(state):  # by the generator's own methods
        raise _refusal("The step")


def _is_current(state: torch.Tensor) -> bool:
    with _disable_current_modes():
        return torch.equal(state, torch.default_generator.get_state())


def _for_us() -> bool:
    """Say whether the innermost code outside of PyTorch and the standard library is this project's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = os.path.realpath(frame.f_code.co_filename)
        if not file.startswith(_TORCH) and os.path.basename(file) != "contextlib.py":
            return bool(file.startswith(_OURS))
        frame = frame.f_back
    return False
