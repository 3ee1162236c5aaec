"""What code keeps for its next call, wherever that is: a trace leaves nothing there, and steps what plain ones do."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from stowage.stages.ir.errors import TraceError
from stowage.stages.trace.step import record_step
from tests.api.beside_plain import WIDTH, Script, adamw, mlp, rows, square, trains_equally

Table = Callable[[int], Any]


class Weighted(nn.Module):
    """Weights what it computes by a table that it gets of a function."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.net = mlp()
        type(self).table = staticmethod(table)  # where a snapshot of the object's own attributes does not see it

    def forward(self, x: torch.Tensor) -> Any:
        table = type(self).table(WIDTH)  # type: ignore[attr-defined]
        return self.net(x) * (table["of"][0] if isinstance(table, dict) else table)


def weighted(table: Table) -> nn.Module:
    """A model of a class of its own."""
    return type("Own", (Weighted,), {})(table)


def of_a_class() -> tuple[Table, Callable[[], Any]]:
    class Tables:
        known: torch.Tensor | None = None

        @classmethod
        def of(cls, width: int) -> torch.Tensor:
            if cls.known is None:
                cls.known = torch.arange(width) / width
            return cls.known

    return Tables.of, lambda: Tables.known


def of_a_base() -> tuple[Table, Callable[[], Any]]:
    class Base:
        known: ClassVar[dict[int, torch.Tensor]] = {}

    class Tables(Base):
        def of(self, width: int) -> torch.Tensor:
            if width not in self.known:
                self.known[width] = torch.arange(width) / width
            return self.known[width]

    return Tables().of, lambda: list(Base.known.values())


def of_slots() -> tuple[Table, Callable[[], Any]]:
    class Tables:
        __slots__ = ("known",)

        def of(self, width: int) -> torch.Tensor:
            if not hasattr(self, "known"):
                self.known = torch.arange(width) / width
            return self.known

    tables = Tables()
    return tables.of, lambda: tables.known


def of_a_function() -> tuple[Table, Callable[[], Any]]:
    def table(width: int) -> torch.Tensor:
        if not hasattr(table, "known"):
            table.known = torch.arange(width) / width  # type: ignore[attr-defined]
        return table.known  # type: ignore[attr-defined, no-any-return]

    return table, lambda: table.known  # type: ignore[attr-defined]


def of_a_default() -> tuple[Table, Callable[[], Any]]:
    def table(width: int, *, known: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
        if width not in known:
            known[width] = torch.arange(width) / width
        return known[width]

    return table, lambda: list(table.__kwdefaults__["known"].values())


def of_a_module() -> tuple[Table, Callable[[], Any]]:
    module = types.ModuleType("tables_of_a_user")
    exec(
        "import torch\n"
        "known = None\n"
        "def of(width):\n"
        "    global known, seen\n"
        "    if known is None:\n"
        "        known = seen = torch.arange(width) / width\n"
        "    return known\n",
        vars(module),
    )

    def table(width: int) -> Any:
        return module.of(width)

    return table, lambda: [module.known, module.seen]


def of_a_cached_function() -> tuple[Table, Callable[[], Any]]:
    @functools.lru_cache(maxsize=4)
    def table(width: int) -> dict[str, list[torch.Tensor]]:
        return {"of": [torch.arange(width) / width]}

    return table, lambda: table(WIDTH)["of"][0]


def of_a_cached_method() -> tuple[Table, Callable[[], Any]]:
    class Tables:
        @functools.cache  # noqa: B019
        def of(self, width: int) -> torch.Tensor:
            return torch.arange(width) / width

    tables = Tables()
    return tables.of, lambda: tables.of(WIDTH)


KINDS = [
    of_a_class,
    of_a_base,
    of_slots,
    of_a_function,
    of_a_default,
    of_a_module,
    of_a_cached_function,
    of_a_cached_method,
]


@pytest.mark.exactness
@pytest.mark.parametrize("kind", KINDS)
def test_caches_have_real_values(kind: Any) -> None:
    def make() -> Script:
        table, seen = kind()
        model = weighted(table)
        return Script(model, adamw(model), square, rows(3), seen=seen)

    trains_equally(make, "90%")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_leaves_nothing(kind: Any, fails: bool) -> None:
    table, seen = kind()
    model = weighted(table)

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        if fails:
            raise RuntimeError
        return square(outputs, batch)

    try:
        record_step(model, rows(1)[0], loss=loss)
        assert not fails
    except TraceError:
        assert fails
    assert not any(isinstance(item, FakeTensor) for item in tree_leaves([table(WIDTH), seen()]))


def test_a_counter_of_a_class_counts() -> None:
    def make() -> Script:
        class Counted(Weighted):
            calls = 0
            means: ClassVar[list[float]] = []

            def forward(self, x: torch.Tensor) -> Any:
                y = super().forward(x)
                Counted.calls += 1
                Counted.means.append(y.mean().item())
                return y

        model = Counted(lambda width: torch.ones(width))
        return Script(model, adamw(model), square, rows(3), seen=lambda: [Counted.calls, Counted.means])

    trains_equally(make, "90%")


def test_what_two_functions_know_counts_once() -> None:
    """A global that both change, and a variable of the function around them."""
    module = types.ModuleType("counters_of_a_user")

    def make() -> Script:
        exec(
            "calls = 0\n"
            "def first():\n"
            "    global calls\n"
            "    calls += 1\n"
            "def second():\n"
            "    global calls\n"
            "    calls += 2\n",
            vars(module),
        )
        known = 0

        def more() -> None:
            nonlocal known
            known += 3

        def most() -> None:
            nonlocal known
            known += 4

        def table(width: int) -> torch.Tensor:
            for function in (module.first, module.second, more, most):
                function()
            return torch.ones(width)

        model = weighted(table)
        return Script(model, adamw(model), square, rows(3), seen=lambda: [module.calls, known])

    trains_equally(make, "90%")


def test_other_caches_stay() -> None:
    """Of those that hold no tensor of the trace nothing is forgotten."""

    @functools.cache
    def number(width: int) -> int:
        return width

    model = weighted(lambda width: torch.ones(width) * number(width))
    for _ in range(2):
        record_step(model, rows(1)[0], loss=square)
    assert number.cache_info().misses == 1
