"""What a step reads outside of its batch is found, read again quickly, and nothing else is watched."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stowage.stages.workload.executed import executed
from stowage.stages.workload.models import build_model
from stowage.stages.workload.reach import watch
from stowage.stages.workload.surroundings import MISSING, Surroundings, differences, same_value, same_values
from tests.workload import settings_of_users
from tests.workload.counted import calls_in

BETA = 0.1
LISTED = [0.1, 0.2]
NAMED: dict[str, Any] = {"kl": {"weight": 0.5}, "other": 1}


class Mode(enum.Enum):
    A = "a"
    B = "b"


@dataclass
class Config:
    beta: float = 0.1
    unread: float = 1.0
    deep: dict[str, Any] = field(default_factory=lambda: {"scale": 2.0})


class Base:
    __slots__ = ("hidden",)
    shared = 3.0


class Loss(Base):
    def __init__(self) -> None:
        self.hidden = 1.0
        self.config = Config()
        self._beta = 0.1
        self.weights = [0.1, torch.ones(2)]
        self.log_history = [{"loss": 1.0}] * 1000

    @property
    def beta(self) -> float:
        return self._beta

    def unread(self) -> Any:
        return self.log_history

    def by_config(self, x: Any) -> Any:
        return x * self.config.beta * self.config.deep["scale"]

    def by_property(self, x: Any) -> Any:
        return x * self.beta

    def by_slot(self, x: Any) -> Any:
        return x * self.hidden

    def by_class(self, x: Any) -> Any:
        return x * self.shared

    def by_list(self, x: Any) -> Any:
        return x * self.weights[0] * self.weights[1]

    def by_name(self, x: Any) -> Any:
        return x * getattr(self, "_beta")  # noqa: B009


def found(call: Callable[..., Any], *roots: Any) -> Surroundings:
    with executed() as ran:
        call(torch.ones(2))
    return watch({"loss": roots[0] if roots else call}, ran)


def closing(box: dict[str, Any]) -> tuple[Callable[..., Any], Callable[[float], None]]:
    beta = 0.1

    def set_beta(value: float) -> None:
        nonlocal beta
        beta = value

    return lambda x: x * beta * box["n"], set_beta


def by_default(x: Any, scale: float = 0.1, *, more: float = 2.0) -> Any:
    return x * scale * more


def set_defaults(value: float) -> None:
    by_default.__defaults__ = (value,)


def by_global(x: Any) -> Any:
    return x * BETA


def set_global(value: float) -> None:
    globals()["BETA"] = value


def by_module(x: Any) -> Any:
    return x * settings_of_users.WEIGHT * settings_of_users.SCALES["kl"]


def by_function_of_module(x: Any) -> Any:
    return settings_of_users.scaled(x)


def by_named(x: Any) -> Any:
    return x * NAMED["kl"]["weight"] * LISTED[1]


def decorated(function: Callable[..., Any], scale: list[float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(x: Any) -> Any:
        return function(x) * scale[0]

    return inner


LOSS = Loss()
BOX: dict[str, Any] = {"n": 1.0}
CLOSED, SET_CLOSED = closing(BOX)
SCALE = [1.0]
TEACHER = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
HOLDER = SimpleNamespace(mode=Mode.A, dtype=torch.float32, number=np.float32(1), array=np.ones(3), teacher=TEACHER)


def by_holder(x: Any) -> Any:
    return (HOLDER.mode, HOLDER.dtype, HOLDER.number, HOLDER.array, HOLDER.teacher(x))


def change(holder: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: setattr(holder, name, value)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "closure": (CLOSED, lambda: SET_CLOSED(0.5), "loss.beta is 0.5"),
    "item of a closure": (CLOSED, lambda: BOX.update(n=2.0), "loss.box['n'] is 2.0"),
    "default": (by_default, lambda: set_defaults(0.5), "loss.scale is 0.5"),
    "keyword default": (by_default, lambda: by_default.__kwdefaults__.update(more=3.0), "loss.more is 3.0"),  # type: ignore[union-attr]
    "global": (by_global, lambda: set_global(0.5), f"{__name__}.BETA is 0.5"),
    "global of another module": (by_module, change(settings_of_users, "WEIGHT", 0.9), "WEIGHT is 0.9"),
    "dictionary of another module": (by_module, lambda: settings_of_users.SCALES.update(kl=9.0), "SCALES['kl'] is 9.0"),
    "function of another module": (by_function_of_module, change(settings_of_users, "WEIGHT", 0.7), "WEIGHT is 0.7"),
    "nested dictionary": (by_named, lambda: NAMED["kl"].update(weight=0.7), "NAMED['kl']['weight'] is 0.7"),
    "list": (by_named, lambda: LISTED.__setitem__(1, 0.7), "LISTED[1] is 0.7"),
    "longer list": (by_named, lambda: LISTED.append(0.7), "LISTED is"),
    "dataclass": (LOSS.by_config, change(LOSS.config, "beta", 0.5), "loss.config.beta is 0.5"),
    "other dataclass": (LOSS.by_config, lambda: setattr(LOSS, "config", Config(0.25)), "loss.config.beta is 0.25"),
    "its dictionary": (LOSS.by_config, lambda: LOSS.config.deep.update(scale=3.0), "loss.config.deep['scale'] is 3.0"),
    "behind a property": (LOSS.by_property, change(LOSS, "_beta", 0.6), "loss._beta is 0.6"),
    "slot": (LOSS.by_slot, change(LOSS, "hidden", 0.6), "loss.hidden is 0.6"),
    "attribute of a class": (LOSS.by_class, change(Base, "shared", 0.6), "Base.shared is 0.6"),
    "attribute over one of a class": (LOSS.by_class, change(LOSS, "shared", 0.5), "loss.shared is 0.5"),
    "list of an object": (LOSS.by_list, lambda: LOSS.weights.__setitem__(0, 0.6), "loss.weights[0] is 0.6"),
    "name in a string": (LOSS.by_name, change(LOSS, "_beta", 0.9), "loss._beta is 0.9"),
    "partial": (functools.partial(by_default, scale=4.0), lambda: None, ""),
    "below a decorator": (decorated(by_global, SCALE), lambda: set_global(0.8), "BETA is 0.8"),
    "of a decorator": (decorated(by_global, SCALE), lambda: SCALE.__setitem__(0, 3.0), "scale[0] is 3.0"),
    "enumeration": (by_holder, change(HOLDER, "mode", Mode.B), "mode is <Mode.B: 'b'>"),
    "dtype": (by_holder, change(HOLDER, "dtype", torch.float64), "dtype is torch.float64"),
    "NumPy number": (by_holder, change(HOLDER, "number", np.float32(2)), "number is np.float32(2.0)"),
    "NumPy array": (by_holder, lambda: HOLDER.array.__setitem__(0, 5), "array is"),
    "mode of another module": (by_holder, lambda: TEACHER.eval(), "teacher is"),
    "attribute of another module": (by_holder, lambda: setattr(TEACHER[1], "p", 0.5), "teacher is"),
    "method replaced by another": (lambda x: LOSS.by_slot(x), lambda: setattr(LOSS, "by_slot", by_global), "by_slot"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_watched(name: str) -> None:
    call, alter, sentence = CASES[name]
    surroundings = found(call)
    before = surroundings.values()
    assert same_values(before, surroundings.values())
    alter()
    sentences = differences(surroundings.paths, before, surroundings.values())
    assert (any(sentence in s for s in sentences) and sentence) or not (sentence or sentences), sentences


def test_what_no_code_names_is_not_watched() -> None:
    paths = found(LOSS.by_config).paths
    assert not any("log_history" in path or "unread" in path or "UNREAD" in path for path in paths)


def test_what_is_gone_is_absent() -> None:
    holder = SimpleNamespace(beta=0.5)
    surroundings = found(lambda x: x * holder.beta)
    before = surroundings.values()
    del holder.beta
    assert MISSING in surroundings.values()
    assert "loss.holder.beta is absent; the step was traced with 0.5." in differences(
        surroundings.paths, before, surroundings.values()
    )


def test_tensors_are_found_where_they_are_and_read_again() -> None:
    holder = SimpleNamespace(bank=torch.ones(2), queue=[torch.zeros(2)])
    surroundings = found(lambda x: x * holder.bank + holder.queue[0])
    path = surroundings.path_of(holder.bank)
    assert path == "loss.holder.bank"
    assert surroundings.path_of(holder.queue[0]) == "loss.holder.queue[0]"
    before = surroundings.values()
    holder.bank = torch.full((2,), 7.0)
    assert surroundings.read(path) is holder.bank
    assert same_values(before, surroundings.values()), "another tensor of the same form"
    del holder.bank
    assert surroundings.read(path) is MISSING


def test_parameters_of_other_modules_are_tensors_and_those_of_the_model_are_not() -> None:
    model, teacher = nn.Linear(2, 2), nn.Linear(2, 2)

    def loss(x: Any) -> Any:
        return model(x) - teacher(x)

    with executed() as ran:
        loss(torch.ones(2))
    surroundings = watch({"model": model, "loss": loss}, ran, model=model)
    assert set(surroundings.tensors) == {"loss.teacher.weight", "loss.teacher.bias"}


def test_the_same_value() -> None:
    nan = float("nan")
    assert same_value(nan, float("nan"))
    assert same_value((1.0, nan), (1.0, float("nan")))
    assert not same_value(0.0, -0.0)
    assert not same_value(1, True)
    assert not same_value(1, 1.0)


def test_quick_enough_for_every_step() -> None:
    model = build_model("gpt2", {"n_layer": 12, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}, seed=0)
    config = Config()

    def loss(x: Any) -> Any:
        return model(x).logits.sum() * config.beta

    with executed() as ran:
        loss(torch.zeros(1, 4, dtype=torch.int64))
    surroundings = watch({"model": model, "loss": loss}, ran, model=model)
    before = surroundings.values()
    assert len(surroundings.paths) < 200, surroundings.paths
    assert calls_in(lambda: same_values(before, surroundings.values())) < 450, "about 0.1 ms on a laptop core"
