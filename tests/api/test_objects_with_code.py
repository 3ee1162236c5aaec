"""Objects beside a model whose classes compute attributes, stand for others or watch their members: none is asked."""

from __future__ import annotations

import array
import contextvars
import ctypes
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from tests.api.beside_plain import Script, adamw, mlp, rows, square, trains_equally


class Unready:
    """Has slots, and answers every other question with an error of its own, as objects do that wait for a set-up."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was asked for before the set-up")


class Lazy:
    """Stands for an object that it makes when its class is asked for."""

    made = 0

    def __init__(self) -> None:
        object.__setattr__(self, "scale", 2.0)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        type(self).made += 1
        raise RuntimeError("there is no connection")


class Hidden:
    """Shows a dictionary that it computes instead of its own."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nothing to see")

    @property
    def scale(self) -> float:
        return 2.0


class Watched(list[float]):
    """Lets nobody read all of it, nor empty it."""

    def __iter__(self) -> Any:
        raise RuntimeError("read one by one")

    def clear(self) -> None:
        raise RuntimeError("kept for good")

    extend = clear  # type: ignore[assignment]

    @property
    def scale(self) -> float:
        self.append(0.0)
        return self[0]


class Counting(OrderedDict[str, float]):
    """A dictionary that allows no entry after the first, and does not list what it has."""

    def __setitem__(self, key: str, value: float) -> None:
        if len(self) > 0 and key not in self:
            raise RuntimeError("full")
        super().__setitem__(key, value)

    def items(self) -> Any:
        raise RuntimeError("not listed")

    def clear(self) -> None:
        raise RuntimeError("kept for good")

    @property
    def scale(self) -> float:
        self["x"] = self.get("x", 1.0) + 0.0
        return 2.0


class Last(deque[float]):
    """A deque that knows its own bound."""

    def __iter__(self) -> Any:
        raise RuntimeError("read one by one")

    @property
    def scale(self) -> float:
        return self[0]


class Scaled(nn.Module):
    """Scales by what an object says."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.net = mlp()
        self.held = {"scale": held}

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x) * self.held["scale"].scale


def counting() -> Counting:
    made = Counting()
    made["x"] = 1.0
    return made


@pytest.mark.parametrize(
    "make_held",
    [Unready, Lazy, Hidden, partial(Watched, [2.0]), counting, partial(Last, [2.0])],
    ids=["unready", "lazy", "hidden", "watched", "counting", "last"],
)
def test_equal_to_plain(make_held: Callable[[], Any], fit_stores: Any) -> None:
    def make() -> Script:
        model = Scaled(make_held())
        return Script(model, adamw(model), square, rows())

    trains_equally(make, "100%", cache_dir=fit_stores)


def test_a_partial_that_keeps_something(fit_stores: Any) -> None:
    def scaled(kept: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if "scale" not in kept:
            kept["scale"] = torch.ones(()) * 2
        return x * kept["scale"]

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.scaled = partial(scaled, {})

        def forward(self, x: torch.Tensor) -> Any:
            return self.scaled(self.net(x))

    def make() -> Script:
        model = Partly()
        return Script(model, adamw(model), square, rows())

    trains_equally(make, "100%", cache_dir=fit_stores)


def test_a_package_whose_name_begins_like_pytorchs(fit_stores: Any) -> None:
    class Tables:
        __module__ = "torchlike.tables"

        def __init__(self) -> None:
            self.known: torch.Tensor | None = None

        @property
        def scale(self) -> torch.Tensor:
            if self.known is None:
                self.known = torch.ones(()) * 2
            return self.known

    def make() -> Script:
        model = Scaled(Tables())
        return Script(model, adamw(model), square, rows())

    trains_equally(make, "100%", cache_dir=fit_stores)


class Made(types.ModuleType):
    """A module that is made while the program runs."""


@pytest.mark.parametrize(
    "make_held", [threading.local, partial(types.ModuleType, "settings"), partial(Made, "settings")]
)
def test_what_is_kept_for_a_thread_or_in_a_module_without_a_file_is_seen(
    make_held: Callable[[], Any], fit_stores: Any
) -> None:
    held = make_held()
    held.scale = 2.0
    _changes_are_seen(Scaled(held), lambda: setattr(held, "scale", 0.5), fit_stores)


def _changes_are_seen(model: nn.Module, change: Callable[[], Any], stores: Any) -> None:
    """Assert that a step after a change computes what plain PyTorch does; nothing trains, and the first are checked."""
    (batch,) = rows(1)
    step = fit(
        model,
        batch,
        torch.optim.SGD(model.parameters(), 0.0),
        device_budget="64MiB",
        loss=square,
        quick=True,
        cache_dir=stores,
        say=lambda text: None,
    )
    for _ in range(4):
        step(batch)
    change()
    torch.manual_seed(7)
    expected = square(model(batch), batch)
    torch.manual_seed(7)
    assert torch.equal(step(batch).detach(), expected.detach())


class Value:
    """Has a scale."""

    scale = 2.0


def of_a_context() -> tuple[Callable[[], float], Callable[[], Any]]:
    variable = contextvars.ContextVar("scale", default=2.0)
    return lambda: variable.get(), lambda: variable.set(0.5)


def of_a_weak_reference() -> tuple[Callable[[], float], Callable[[], Any]]:
    value = Value()
    reference = weakref.ref(value)
    return lambda: reference().scale, lambda: setattr(value, "scale", 0.5)  # type: ignore[union-attr]


def of_a_proxy() -> tuple[Callable[[], float], Callable[[], Any]]:
    behind = {"scale": 2.0}
    proxy = types.MappingProxyType(behind)
    return lambda: proxy["scale"], lambda: behind.update(scale=0.5)


def of_a_list() -> tuple[Callable[[], float], Callable[[], Any]]:
    numbers = [2.0]
    return lambda: numbers[0], lambda: numbers.__setitem__(0, 0.5)


def of_an_array() -> tuple[Callable[[], float], Callable[[], Any]]:
    numbers = array.array("d", [2.0])
    return lambda: numbers[0], lambda: numbers.__setitem__(0, 0.5)


def of_bytes() -> tuple[Callable[[], float], Callable[[], Any]]:
    numbers = bytearray([2])
    return lambda: float(numbers[0]), lambda: numbers.__setitem__(0, 3)


def of_c() -> tuple[Callable[[], float], Callable[[], Any]]:
    number = ctypes.c_double(2.0)
    return lambda: number.value, lambda: setattr(number, "value", 0.5)


@pytest.mark.parametrize(
    "make", [of_a_context, of_a_weak_reference, of_a_proxy, of_a_list, of_an_array, of_bytes, of_c]
)
def test_what_pythons_own_objects_hold_is_seen(
    make: Callable[[], tuple[Callable[[], float], Callable[[], Any]]], fit_stores: Any
) -> None:
    get, change = make()

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x) * get()

    _changes_are_seen(Scaling(), change, fit_stores)
