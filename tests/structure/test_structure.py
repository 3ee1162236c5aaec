"""Batches of any class, taken apart and put together with other tensors."""

from __future__ import annotations

import enum
import threading
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from stowage.stages.ir.errors import ParameterError
from stowage.stages.structure import copied, leaves, parts, tensors_of, with_tensors
from stowage.stages.structure.parts import LIMIT


def tensor(number: float) -> Tensor:
    return torch.full((2,), number)


@dataclass
class Sample:
    x: Tensor
    name: str = "n"
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._hidden = [x + 1]

    @property
    def computed(self) -> Tensor:
        raise AssertionError("no property is run")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nothing is asked of the object: {name}")


class Slots:
    __slots__ = ("__private", "missing", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.__private = x, x * 2


class Model(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    x: Tensor
    n: int = 3


class Growing(list[Any]):
    def __init__(self, *items: Any) -> None:
        super().__init__(items)
        self.length = len(items)
        self.mask = tensor(9)

    def __iter__(self) -> Any:
        raise AssertionError("not this one")


class Untouched(dict[str, Any]):
    def __init__(self) -> None:
        raise AssertionError("__init__ is not called")


def untouched() -> Untouched:
    made = Untouched.__new__(Untouched)
    dict.__setitem__(made, "x", tensor(1))
    made.note = tensor(2)  # type: ignore[attr-defined]
    return made


OldPair = namedtuple("OldPair", ["x", "y"])

CASES: dict[str, tuple[Any, list[str]]] = {
    "tensor": (tensor(1), ["batch"]),
    "dict": ({"b": tensor(1), "a": tensor(2), "n": 3}, ["b", "a"]),
    "nested": ({"parts": [tensor(0), {"deep": (tensor(1), None)}]}, ["parts.0", "parts.1.deep.0"]),
    "list": ([tensor(1), 2, tensor(3)], ["0", "2"]),
    "equal labels": ({"a": {"b": tensor(1)}, "a.b": tensor(2)}, ["a.b", "a.b'"]),
    "UserDict": (UserDict({"x": tensor(1), "y": UserDict(z=tensor(2))}), ["x", "y.z"]),
    "UserList": (UserList([tensor(1), tensor(2)]), ["0", "1"]),
    "BatchEncoding": (BatchEncoding({"input_ids": tensor(1), "labels": tensor(2)}), ["input_ids", "labels"]),
    "ModelOutput": (BaseModelOutput(last_hidden_state=tensor(1), attentions=(tensor(2),)),  # type: ignore[arg-type]
                    ["last_hidden_state", "attentions.0"]),
    "OrderedDict": (OrderedDict(y=tensor(1), x=tensor(2)), ["y", "x"]),
    "defaultdict": (defaultdict(list, x=[tensor(1)]), ["x.0"]),
    "dict subclass": (untouched(), ["x", "note"]),
    "list subclass": (Growing(tensor(1), tensor(2)), ["0", "1", "mask"]),
    "deque": (deque([tensor(1)], maxlen=2), ["0"]),
    "set": ({tensor(1)}, ["0"]),
    "dataclass": (Sample(tensor(1), more={"y": tensor(2)}), ["x", "more.y"]),
    "frozen with slots": (Frozen(tensor(1), tensor(2)), ["x", "y"]),
    "named tuple": (Pair(tensor(1), tensor(2)), ["x", "y"]),
    "old named tuple": ([OldPair(tensor(1), tensor(2))], ["0.x", "0.y"]),
    "what torch returns": (torch.max(torch.ones(2, 2), 0), ["0", "1"]),
    "object": (Plain(tensor(1)), ["x", "_hidden.0"]),
    "slots": (Slots(tensor(1)), ["_Slots__private", "x"]),
    "pydantic": (Model(x=tensor(1)), ["x"]),
    "namespace": (SimpleNamespace(x=tensor(1), deep=SimpleNamespace(y=tensor(2))), ["x", "deep.y"]),
    "in an object in a list in a mapping": (UserDict(x=[Sample(tensor(1))]), ["x.0.x"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_taken_apart_and_put_together(name: str) -> None:
    batch, labels = CASES[name]
    assert [label for label, _ in leaves(batch)] == labels
    before = tensors_of(batch)
    others = [torch.full_like(t, 100 + i) for i, t in enumerate(before)]
    made = with_tensors(batch, others)
    assert type(made) is type(batch)
    assert [t is o for t, o in zip(tensors_of(made), others, strict=True)] == [True] * len(labels)
    assert all(a is b for a, b in zip(tensors_of(batch), before, strict=True)), "the given one stays"
    for mine, theirs in zip(parts(made), parts(batch), strict=True):
        assert mine[:3] == theirs[:3]
        assert mine.kind == "tensor" or type(mine.item) is type(theirs.item)
        assert mine.kind != "plain" or mine.item == theirs.item


def test_classes_keep_what_makes_them_work() -> None:
    made = copied(defaultdict(list, x=[tensor(1)]))
    assert made["new"] == []
    line = copied(deque([tensor(1)], maxlen=2))
    assert line.maxlen == 2
    output = copied(CASES["ModelOutput"][0])
    assert output.last_hidden_state is output["last_hidden_state"]
    assert output.to_tuple()[1] is output.attentions
    assert copied(Counter("aab")) == Counter("aab")
    order = copied(OrderedDict(y=tensor(1), x=tensor(2)))
    order.move_to_end("y")
    assert list(order) == ["x", "y"]


def test_what_is_taken_out_of_a_copy_stays_in_the_batch() -> None:
    batch = BatchEncoding({"input_ids": tensor(1), "labels": tensor(2)})
    copied(batch).pop("labels")
    assert list(batch) == ["input_ids", "labels"]


def test_a_tensor_that_is_there_twice() -> None:
    x = tensor(1)
    batch = {"a": x, "b": x, "c": [x]}
    assert [label for label, _ in leaves(batch)] == ["a", "b", "c.0"]
    assert [part.same_as for part in parts(batch) if part.kind == "tensor"] == ["", "batch['a']", "batch['a']"]


def test_shared_parts_and_cycles_stay_shared() -> None:
    inner = [tensor(1)]
    top, child = SimpleNamespace(a=inner, b=inner), SimpleNamespace()
    top.child, child.parent, top.me = child, top, [top]
    assert [label for label, _ in leaves(top)] == ["a.0"]
    made = with_tensors(top, [tensor(5)])
    assert made.a is made.b
    assert made.a is not inner
    assert made.child.parent is made
    assert made.me[0] is made
    assert top.child is child


class Colour(enum.Enum):
    RED = "red"


def test_what_holds_no_tensor_is_handed_on() -> None:
    lock, settings = threading.Lock(), Sample.__new__(Sample)
    batch = {"x": tensor(1), "lock": lock, "settings": settings, "colour": Colour.RED, "array": np.ones(3), "f": len}
    made = copied(batch)
    assert all(made[name] is batch[name] for name in batch)


def test_long_rows_of_numbers_are_one_part() -> None:
    batch = {"x": tensor(1), "ids": list(range(1000))}
    assert [part.path for part in parts(batch)] == ["batch", "batch['x']", "batch['ids']"]
    assert copied(batch)["ids"] == batch["ids"]
    assert copied(batch)["ids"] is not batch["ids"]


def test_the_order_of_a_set_of_names_says_nothing() -> None:
    one, two = {"b", "a", "c"}, {"c", "b", "a"}
    assert [p[1:4] for p in parts(one)[1:]] == [p[1:4] for p in parts(two)[1:]]


def test_something_that_reaches_everything_is_no_batch() -> None:
    with pytest.raises(ParameterError, match="batch reaches more than"):
        parts([[None] * 30 for _ in range(LIMIT // 20)])
