"""Remembers what plans of one step within several budgets have in common, so that it is found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Known:
    """Remembers what does not depend on the budget, for one step with its options and one method of planning.

    A caller that plans once makes one and forgets it; a caller that plans within many budgets keeps it. Plans are equal
    either way.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}
        self._parts: dict[Hashable, Known] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned when it was first asked for under this key."""
        if key not in self._found:
            self._found[key] = make()
        found: T = self._found[key]
        return found

    def of(self, object_: T, name: str, make: Callable[[T], Any]) -> Any:
        """Return what `make` returned of this very object, which is kept, so that no other can be taken for it."""
        return self.once((name, id(object_)), lambda: (object_, make(object_)))[1]

    def part(self, key: Hashable) -> Known:
        """Return what is known of a part: a variant of the step, or another chain for it."""
        return self._parts.setdefault(key, Known())
