"""Loads solver libraries when they are first used.

They bring others with them (OR-Tools brings pandas), which take memory from processes that train and seconds from those
that find their plan in a store.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


class LazyModule:
    """Has the names of a module, and loads it when one is first used."""

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self._load = load

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._load(), name)
        setattr(self, name, found)  # the next look-up does not come here
        return found
