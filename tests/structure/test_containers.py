"""Containers are read and restored as they were, whatever a subclass does in methods of its own."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.stages.structure.containers import add, contents, item_of, length_of, put_back

ITEMS = st.lists(st.integers(0, 9), max_size=6)


def refusing(kind: Any) -> Any:
    """Make a subclass that refuses whatever it is asked."""

    def refuse(self: Any, *arguments: Any) -> Any:
        raise RuntimeError("not this way")

    names = ("__iter__", "__len__", "__getitem__", "__setitem__", "items", "clear", "extend", "update", "add")
    return type("Refusing", (kind,), {name: refuse for name in names if hasattr(kind, name)})


def filled(kind: Any, items: list[int]) -> Any:
    """Make a container of a kind that refuses."""
    made = kind.__new__(refusing(kind))
    if issubclass(kind, dict):
        for item in items:
            kind.__setitem__(made, item, -item)
    else:
        add(made, items)
    return made


def changed(kind: Any, made: Any, items: list[int]) -> None:
    """Make other contents."""
    kind.clear(made)
    for item in items:
        if issubclass(kind, dict):
            kind.__setitem__(made, item, item)
        else:
            add(made, [item])


@pytest.mark.parametrize("kind", [list, deque, set, dict, OrderedDict])
@given(before=ITEMS, after=ITEMS)
def test_put_back(kind: Any, before: list[int], after: list[int]) -> None:
    made = filled(kind, before)
    held = contents(made)
    changed(kind, made, after)
    put_back(made, held)
    assert contents(made) == held
    assert length_of(made) == len(held)
    if issubclass(kind, dict):
        assert all(item_of(made, key) == value for key, value in held)


@pytest.mark.parametrize("make", [lambda: (1, 2), lambda: frozenset((1, 2)), lambda: [1, 2]])
def test_contents(make: Callable[[], Any]) -> None:
    assert sorted(contents(make())) == [1, 2]
    assert length_of(make()) == 2


def test_no_container() -> None:
    with pytest.raises(TypeError, match="An object of class int has no items"):
        contents(3)
