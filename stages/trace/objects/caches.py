"""Empties caches of functions into which a trace has put tensors without memory."""

from __future__ import annotations

import functools
import gc
from collections import deque
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from stowage.stages.structure.kinds import dict_of, is_of

Cached = functools._lru_cache_wrapper
"""What `functools.lru_cache` and `functools.cache` make of a function."""

_MOST = 1000
"""The most objects of one cache that are looked at."""


class Caches:
    """Cached functions, and how often each had computed something."""

    def __init__(self) -> None:
        self._misses: list[tuple[Cached[Any], int]] = []

    def add(self, function: Cached[Any]) -> None:
        """Remember a function."""
        self._misses.append((function, function.cache_info().misses))

    def forget(self) -> None:
        """Empty those that have kept a tensor without memory since; what else they kept is computed again."""
        for function, misses in self._misses:
            if function.cache_info().misses != misses and _keeps_fakes(function):
                function.cache_clear()


def _keeps_fakes(function: Cached[Any]) -> bool:
    """Say whether a cache has such a tensor, or something with one; only the garbage collector looks inside."""
    waiting = deque(item for item in gc.get_referents(function) if item is not function.__wrapped__)
    for _ in range(_MOST):
        if not waiting:
            return False
        item = waiting.popleft()
        if is_of(item, FakeTensor):
            return True
        if is_of(item, (tuple, list, set, frozenset, dict)):
            waiting.extend(gc.get_referents(item))
        elif (attributes := dict_of(item)) is not None and not callable(item):
            waiting.extend(attributes.values())
    return False
