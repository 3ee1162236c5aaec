"""What was used lately, and no more than so much of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

Item = TypeVar("Item")


class Recent(Sequence[Item]):
    """A bounded list, the item used last first. Each program holds a whole plan, so who keeps programs bounds them."""

    def __init__(self, most: int) -> None:
        """`most` items are kept."""
        self._most = most
        self._items: list[Item] = []

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: Any) -> Any:
        """The item that so many others have been used after."""
        return self._items[index]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._items)

    @property
    def latest(self) -> Item | None:
        """The item used last."""
        return self._items[0] if self._items else None

    def find(self, suits: Callable[[Item], bool]) -> Item | None:
        """The first item that suits, which is then the latest; None where there is none."""
        for position, item in enumerate(self._items):
            if suits(item):
                self._items.insert(0, self._items.pop(position))
                return item
        return None

    def add(self, item: Item) -> list[Item]:
        """Put an item in front; return what there is no room for any more."""
        self._items = [item, *(known for known in self._items if known is not item)]
        dropped = self._items[self._most :]
        del self._items[self._most :]
        return dropped

    def replace(self, old: Item, new: Item) -> None:
        """Put another item in the place of one."""
        self._items = [new if item is old else item for item in self._items]

    def forget(self, these: Callable[[Item], bool]) -> None:
        """Drop the items of which it is true."""
        self._items = [item for item in self._items if not these(item)]
