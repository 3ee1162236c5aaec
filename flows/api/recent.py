"""A bounded list that keeps what was used last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

Item = TypeVar("Item")


class Recent(Sequence[Item]):
    """A bounded list, the item used last first; it bounds how many programs, each with a whole plan, stay in memory."""

    def __init__(self, most: int) -> None:
        """Keep at most `most` items."""
        self._most = most
        self._items: list[Item] = []

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: Any) -> Any:
        """Return the item after which `index` others have been used."""
        return self._items[index]

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    @property
    def latest(self) -> Item | None:
        """Return the item used last, or None."""
        return self._items[0] if self._items else None

    def find(self, suits: Callable[[Item], bool]) -> Item | None:
        """Return the first item that suits, which then is the latest; None where there is none."""
        for position, item in enumerate(self._items):
            if suits(item):
                self._items.insert(0, self._items.pop(position))
                return item
        return None

    def add(self, item: Item) -> list[Item]:
        """Put an item in front; return the items for which there is no room any more."""
        self._items = [item, *(known for known in self._items if known is not item)]
        dropped = self._items[self._most :]
        del self._items[self._most :]
        return dropped

    def replace(self, old: Item, new: Item) -> None:
        """Replace an item by another, at the same position."""
        self._items = [new if item is old else item for item in self._items]

    def forget(self, these: Callable[[Item], bool]) -> None:
        """Drop the items for which `these` is true."""
        self._items = [item for item in self._items if not these(item)]
