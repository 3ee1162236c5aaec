"""A step that changes an array, a buffer or a generator of its own is refused, and they are as they were."""

from __future__ import annotations

import array
import contextvars
import ctypes
import mmap
import multiprocessing
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import TraceError
from stowage.stages.structure.memory import give_back, memory_of, taken
from tests.api.beside_plain import Script, adamw, mlp, rows, square, trains_equally


class Pair(ctypes.Structure):
    """Two numbers of C."""

    _fields_ = (("first", ctypes.c_double), ("second", ctypes.c_double))


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("counted", default=0)
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "ndarray": (lambda: np.zeros(2), lambda a: a.__setitem__(0, a[0] + 1), "changes the ndarray"),
    "view": (lambda: np.zeros((2, 2))[:, 0], lambda a: a.__iadd__(1), "changes the ndarray"),
    "of objects": (lambda: np.array([None]), lambda a: a.__setitem__(0, []), "changes the ndarray"),
    "array": (lambda: array.array("d", [0.0]), lambda a: a.append(1.0), "changes the array"),
    "bytearray": (lambda: bytearray(2), lambda a: a.__setitem__(0, 1), "changes the bytearray"),
    "memoryview": (lambda: memoryview(bytearray(2)), lambda a: a.__setitem__(0, 1), "changes the memoryview"),
    "number of C": (lambda: ctypes.c_int(0), lambda a: setattr(a, "value", a.value + 1), "changes the c_int"),
    "structure": (Pair, lambda a: setattr(a, "second", a.second + 1), "changes the Pair"),
    "processes": (
        lambda: multiprocessing.Value("d"), lambda a: setattr(a, "value", a.value + 1), "changes the c_double",
    ),
    "context": (lambda: VARIABLE, lambda a: a.set(a.get() + 1), "changes the ContextVar"),
    "Random": (lambda: random.Random(0), lambda a: a.random(), "draws from the Random"),
    "RandomState": (lambda: np.random.RandomState(0), lambda a: a.rand(), "draws from the RandomState"),
    "Generator": (lambda: np.random.default_rng(0), lambda a: a.random(), "draws from the Generator"),
}  # fmt: skip


def content(held: Any) -> Any:
    memory = memory_of(getattr(held, "_obj", held))
    assert memory is not None
    return memory.take(getattr(held, "_obj", held))


def model_with(held: Any, do: Callable[[Any], Any]) -> nn.Module:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> Any:
            do(held)
            return self.net(x)

    return Counting()


@pytest.mark.parametrize("case", CASES)
def test_refused_and_as_it_was(case: str, fit_stores: Path) -> None:
    make, change, text = CASES[case]
    held = make()
    before = content(held)
    model = model_with(held, change)
    with pytest.raises(TraceError, match=rf"The step {text} at Counting\.forward\.held") as caught:
        fit(model, rows(1)[0], adamw(model), device_budget="64MiB", loss=square, quick=True, cache_dir=fit_stores)
    assert "\n" not in str(caught.value)
    memory = memory_of(getattr(held, "_obj", held))
    assert memory is not None
    assert memory.same(content(held), before)


@pytest.mark.parametrize("case", CASES)
def test_put_back(case: str) -> None:
    make, change, _ = CASES[case]
    held = make()
    item = getattr(held, "_obj", held)
    memory = memory_of(item)
    assert memory is not None
    before = memory.take(item)
    assert memory.same(memory.take(item), before)
    change(held)
    assert not memory.same(memory.take(item), before)
    memory.put(item, before)
    assert memory.same(memory.take(item), before)


def test_what_is_changed_and_changed_back_is_no_change(fit_stores: Path) -> None:
    held = np.zeros(2)

    def there_and_back(a: Any) -> None:
        a += 1
        a -= 1
        token = VARIABLE.set(5)
        VARIABLE.reset(token)

    def make() -> Script:
        model = model_with(held, there_and_back)
        return Script(model, adamw(model), square, rows())

    trains_equally(make, "100%", cache_dir=fit_stores)


def test_a_module_made_at_run_time_keeps_what_a_step_leaves_there(fit_stores: Path) -> None:
    def make() -> Script:
        kept = types.ModuleType("kept")
        kept.calls = 0  # type: ignore[attr-defined]

        def count(module: Any) -> None:
            module.calls += 1

        model = model_with(kept, count)
        return Script(model, adamw(model), square, rows(), seen=lambda: kept.calls)

    trains_equally(make, "100%", cache_dir=fit_stores)


NAN = float("nan")


@pytest.mark.parametrize(
    "held",
    [
        np.array([NAN]),
        np.array([{}], dtype=[("a", object)]),
        np.broadcast_to(np.zeros(1), (3,)),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        array.array("d", [NAN]),
        ctypes.c_double(NAN),
        (ctypes.c_double * 2)(NAN),
        (ctypes.py_object * 1)(ctypes.py_object({})),
        ctypes.c_char_p(b"text"),
        memoryview((ctypes.c_double * 2)(NAN)),
        memoryview(bytearray(8))[::2],
    ],
)
def test_what_stays_is_no_change(held: Any, fit_stores: Path) -> None:
    memory = memory_of(held)
    assert memory is not None
    before = taken(held, memory)
    assert before is None or memory.same(taken(held, memory), before)
    if before is not None:
        memory.put(held, before)
        assert memory.same(taken(held, memory), before)
    model = model_with(held, type)
    step = fit(model, rows(1)[0], adamw(model), device_budget="64MiB", loss=square, quick=True, cache_dir=fit_stores)
    for batch in rows(2):
        step(batch)


def test_what_is_there_no_longer_is_left_alone() -> None:
    view, mapped = memoryview(bytearray(2)), mmap.mmap(-1, 8)
    view.release()
    mapped.close()
    for held in (view, mapped):
        memory = memory_of(held)
        assert memory is not None
        assert taken(held, memory) is None


def test_objects_behind_pointers_of_c_are_left_alone() -> None:
    """Their bytes are addresses, and what was there may be gone."""

    class Pointing(ctypes.Structure):
        _fields_: ClassVar[Any] = (("number", ctypes.c_int), ("items", ctypes.py_object * 2))

    class Derived(Pointing):
        _fields_: ClassVar[Any] = (("more", ctypes.c_int),)

    for held in ((ctypes.py_object * 1)(), ctypes.c_char_p(b"text"), ctypes.pointer(ctypes.c_int(1)), Derived()):
        memory = memory_of(held)
        assert memory is None or taken(held, memory) is None


def test_what_can_no_longer_be_written_stops_nothing() -> None:
    held, grown = np.zeros(2), bytearray(2)
    of_held, of_grown = memory_of(held), memory_of(grown)
    assert of_held is not None
    assert of_grown is not None
    before, before_grown = taken(held, of_held), taken(grown, of_grown)
    held[0] = 1
    held.flags.writeable = False
    grown += b"more"
    with memoryview(grown):  # it cannot shrink now
        give_back(grown, of_grown, before_grown)
    give_back(held, of_held, before)
    assert (held[0], len(grown)) == (1, 6)


def test_weights_that_share_memory_with_an_array(fit_stores: Path) -> None:
    """What the optimizer changes there is no change by the forward, and is not undone."""

    def make() -> Script:
        model: Any = model_with(None, type)
        layer = model.net[0]
        held = layer.weight.detach().numpy().copy()
        layer.weight = nn.Parameter(torch.from_numpy(held))
        model.held = held
        forward = type(model).forward
        type(model).forward = lambda self, x: forward(self, x) * (1.0 if self.held.shape else 0.0)
        return Script(model, adamw(model), square, rows(5), seen=lambda: torch.from_numpy(held.copy()))

    trains_equally(make, "100%", cache_dir=fit_stores)


def test_a_loss_is_called_by_its_name(fit_stores: Path) -> None:
    counted = np.zeros(1)

    def weighted(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        counted[0] += 1
        return outputs.pow(2).mean()

    model = mlp()
    with pytest.raises(TraceError, match=r"The step changes the ndarray at weighted\.counted, which"):
        fit(model, rows(1)[0], adamw(model), device_budget="64MiB", loss=weighted, quick=True, cache_dir=fit_stores)
    assert counted[0] == 0
