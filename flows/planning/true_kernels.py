"""Traces again where profiling has found that real kernels return something else than fake ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stowage.stages.kernels import FakeKernelError, known_outputs

T = TypeVar("T")


def with_true_kernels(attempt: Callable[[], T], again: Callable[[], None] = lambda: None) -> T:
    """Return what `attempt` returns, which traces and profiles; trace again with what profiling has learnt.

    Args:
        attempt: the work.
        again: called before the work is repeated: it forgets what was traced.

    Raises:
        FakeKernelError: what is known does not help.
    """
    while True:
        try:
            return attempt()
        except FakeKernelError as error:
            if not known_outputs().learn(error.outputs):
                raise
        again()
