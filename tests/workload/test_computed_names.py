"""What code looks up by a name that it computes is watched, and names that stand in it do not widen what is."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.structure.mentioned import computes_names
from stowage.stages.workload.executed import executed
from stowage.stages.workload.reach import watch
from stowage.stages.workload.surroundings import Surroundings, differences
from tests.workload import settings_of_users

SCALE_0 = 2.0


class Weights:
    def __init__(self) -> None:
        self.scale_0 = 1.0
        self.first_gain = 1.0
        self.kl = 1.0
        self.apart = 1.0


WEIGHTS = Weights()


def formatted(x: Any, i: int = 0) -> Any:
    return x * getattr(WEIGHTS, f"scale_{i}")


def percent(x: Any, i: int = 0) -> Any:
    return x * getattr(WEIGHTS, "scale_%d" % i)  # noqa: UP031


def added(x: Any, which: Any = "first") -> Any:
    return x * getattr(WEIGHTS, str(which) + "_gain")


def by_format(x: Any, which: str = "first") -> Any:
    return x * getattr(WEIGHTS, "{}_gain".format(which))  # noqa: UP032


def in_vars(x: Any, i: int = 0) -> Any:
    return x * vars(WEIGHTS)[f"scale_{i}"]


def by_getter(x: Any, i: int = 0) -> Any:
    return x * operator.attrgetter(f"scale_{i}")(WEIGHTS)


def in_globals(x: Any, i: int = 0) -> Any:
    return x * globals()[f"SCALE_{i}"]


def of_module(x: Any, which: str = "WEI") -> Any:
    return x * getattr(settings_of_users, which + "GHT")


def helped(x: Any, i: int = 0) -> Any:
    return x * _helper(f"scale_{i}")


def _helper(name: str) -> Any:
    return getattr(WEIGHTS, name)


class Losses(nn.Module):
    """Names stand in its data: as an attribute, in a list, as keys."""

    def __init__(self) -> None:
        super().__init__()
        self.term = "k" + "l"
        self.terms = [["k" + "l"]]
        self.shares = {"k" + "l": 1.0}

    def by_attribute(self, x: Any) -> Any:
        return x * getattr(WEIGHTS, self.term)

    def by_list(self, x: Any) -> Any:
        return sum(x * getattr(WEIGHTS, name) for names in self.terms for name in names)

    def by_keys(self, x: Any) -> Any:
        return sum(x * share * getattr(WEIGHTS, name) for name, share in self.shares.items())


LOSSES = Losses()

CASES: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "f-string": (formatted, WEIGHTS, "scale_0"),
    "percent": (percent, WEIGHTS, "scale_0"),
    "sum": (added, WEIGHTS, "first_gain"),
    "format": (by_format, WEIGHTS, "first_gain"),
    "vars": (in_vars, WEIGHTS, "scale_0"),
    "attrgetter": (by_getter, WEIGHTS, "scale_0"),
    "globals": (in_globals, None, "SCALE_0"),
    "of a module": (of_module, settings_of_users, "WEIGHT"),
    "made by the caller": (helped, WEIGHTS, "scale_0"),
    "in an attribute": (LOSSES.by_attribute, WEIGHTS, "kl"),
    "in a list": (LOSSES.by_list, WEIGHTS, "kl"),
    "keys": (LOSSES.by_keys, WEIGHTS, "kl"),
}


def found(call: Callable[..., Any]) -> Surroundings:
    with executed() as ran:
        call(torch.ones(2))
    return watch({"loss": call}, ran, model=LOSSES)


@pytest.mark.parametrize("name", CASES)
def test_what_is_looked_up_by_a_computed_name_is_watched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, holder, attribute = CASES[name]
    surroundings = found(call)
    before = surroundings.values()
    if holder is None:
        monkeypatch.setitem(globals(), attribute, 5.5)
    else:
        monkeypatch.setattr(holder, attribute, 5.5)
    sentences = differences(surroundings.paths, before, surroundings.values())
    assert any(f"{attribute} is 5.5" in s for s in sentences), sentences
    assert not any("apart" in path for path in surroundings.paths)


def test_variables_of_the_environment_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(x: Any) -> Any:
        return x * float(os.environ.get("STOWAGE_TEST_SCALE", "1"))

    surroundings = found(loss)
    before = surroundings.values()
    monkeypatch.setenv("STOWAGE_TEST_OTHER", "2")
    assert not differences(surroundings.paths, before, surroundings.values())
    monkeypatch.setenv("STOWAGE_TEST_SCALE", "2")
    (sentence,) = differences(surroundings.paths, before, surroundings.values())
    assert "os.environ['STOWAGE_TEST_SCALE'] is '2'" in sentence
    assert not any("os.environ" in path for path in found(formatted).paths)


def test_names_that_stand_in_the_code_do_not_widen_what_is_watched() -> None:
    holder = SimpleNamespace(rate=1.0, rate_of_another=2.0, mean=3.0)

    def loss(x: Any) -> Any:
        return x.mean() * getattr(holder, "rate", 1.0) * (2.0 if hasattr(holder, "other") else 1.0)

    paths = found(loss).paths
    assert any(path.endswith("holder.rate") for path in paths)
    assert not any("rate_of_another" in path for path in paths)


def literal(x: Any) -> Any:
    plain = x.a, getattr(x.b(1), "c", None), setattr(x, "d", [x, 1]), x.e.f
    return plain, operator.attrgetter("g.h")(x), hasattr(x, "i") and getattr(x, "j", x.k(x, y=2))


def variable(x: Any, name: str = "a") -> Any:
    return x.a, getattr(x, name)


def nested(x: Any, name: str = "a") -> Any:
    return getattr(x, name).a


def concatenated(x: Any) -> Any:
    return getattr(x, "a" + x)


def of_method(x: Any) -> Any:
    return getattr(x, "a".lower(), None)


def starred(x: Any) -> Any:
    return getattr(*x)


def passed_on(x: Any) -> Any:
    return list(map(getattr, x, x))


def neither(x: Any) -> Any:
    return x.getter(x), x["getattr"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (literal, False),
        (neither, False),
        (variable, True),
        (nested, True),
        (concatenated, True),
        (of_method, True),
        (starred, True),
        (passed_on, True),
    ],
)
def test_what_computes_a_name(function: FunctionType, expected: bool) -> None:
    assert computes_names(function.__code__) is expected
