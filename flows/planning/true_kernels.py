"""Trace again where profiling has found that real kernels return something else than fake ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stowage.stages.kernels import FakeKernelError, known_outputs

T = TypeVar("T")


def with_true_kernels(attempt: Callable[[], T], again: Callable[[], None] = lambda: None) -> T:
    """What `attempt` returns, which traces and profiles. What profiling learns is known to the next tracing.

    Args:
        attempt: the work.
        again: called before it is done again: it forgets what was traced.

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
