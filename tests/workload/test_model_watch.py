"""A model's signature is taken anew exactly where it has changed: whatever is done to a model, the watch says what a
fresh look says."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stowage.stages.workload.model_watch import ModelWatch
from stowage.stages.workload.signature import model_signature
from tests.matrix import examples


class Scaled(nn.Module):
    """Plain attributes of every kind, a buffer, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.times, self.on, self.how, self.nothing = 0.5, 1, True, "mean", None
        self.things: list[int] = []
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("missing", None)
        self.register_parameter("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.scale


class Other(Scaled):
    """The same under another name."""


def model() -> nn.Module:
    """A small tree, with a tied weight."""
    inner = nn.Sequential(Scaled(), nn.Dropout(0.1), nn.Linear(3, 3))
    found = nn.Sequential(nn.Linear(3, 3), inner, Scaled())
    found[2].weight = found[0].weight
    return found


def hook(*args: Any) -> None:
    """Does nothing."""


def _replace(m: nn.Module, name: str) -> None:
    """A parameter or buffer by an equal one."""
    state = vars(m)
    table = state["_parameters"] if name in state["_parameters"] else state["_buffers"]
    table[name] = copy.deepcopy(table[name])


def _rename(table: dict[str, Any], before: str, after: str) -> None:
    for name, value in [*table.items()]:  # in its place, so that only the name differs
        del table[name]
        table[after if name == before else name] = value


def _move_hook(m: nn.Module) -> None:
    """From one module to another: the number of all hooks stays."""
    found = m[1][0]._forward_hooks
    if not found:
        m[1][0].register_forward_hook(hook)
        return
    key, value = found.popitem()
    m[2]._forward_hooks[key] = value


def _move_tensor_hook(m: nn.Module) -> None:
    one, two = m[1][0].weight, m[1][2].weight
    if one._post_accumulate_grad_hooks:
        _, value = one._post_accumulate_grad_hooks.popitem()
        two.register_post_accumulate_grad_hook(value)
    else:
        one.register_post_accumulate_grad_hook(hook)


def _toggle(m: nn.Module, name: str, one: Any, two: Any) -> None:
    now = getattr(m, name)
    setattr(m, name, two if type(now) is type(one) and now == one else one)


def _drop_or_add(m: nn.Module) -> None:
    if hasattr(m, "extra"):
        del m.extra
    else:
        m.extra = 3


def _put_forward(m: nn.Module) -> None:
    if "forward" in vars(m):
        del m.forward
    else:
        m.forward = functools.partial(type(m).forward, m)


def _other_forward(m: nn.Module) -> None:
    """First one, then another."""

    def one(x: torch.Tensor) -> torch.Tensor:
        return x

    def two(x: torch.Tensor) -> torch.Tensor:
        return x

    m.forward = two if "one" in getattr(vars(m).get("forward"), "__qualname__", "") else one


def _rename_attribute(m: nn.Module) -> None:
    """In its place, and of one type: only the name differs."""
    state = vars(m)
    _rename(state, *(("how", "why") if "how" in state else ("why", "how")))


def _requires(m: nn.Module) -> None:
    weight = m[1][2].weight
    weight.requires_grad_(not weight.requires_grad)


def _narrow(m: nn.Module) -> None:
    weight = m[1][2].weight
    weight.data = weight.data[:, : max(1, weight.shape[1] - 1)].clone()


def _retype(m: nn.Module) -> None:
    running = m[1][0].running
    running.data = running.data.to(torch.float64 if running.dtype is torch.float32 else torch.float32)


def _buffer_none(m: nn.Module) -> None:
    m[1][0].missing = torch.zeros(1) if m[1][0].missing is None else None


def _parameter_none(m: nn.Module) -> None:
    m[1][0].absent = nn.Parameter(torch.zeros(1)) if m[1][0].absent is None else None


def _new_buffer(m: nn.Module) -> None:
    dropout = m[1][1]
    if "late" in dropout._buffers:
        del dropout._buffers["late"]
    else:
        dropout.register_buffer("late", torch.zeros(2))


def _new_parameter(m: nn.Module) -> None:
    dropout = m[1][1]
    if "late_weight" in dropout._parameters:
        del dropout._parameters["late_weight"]
    else:
        dropout.late_weight = nn.Parameter(torch.zeros(2))


def _new_module(m: nn.Module) -> None:
    dropout = m[1][1]
    if "late_module" in dropout._modules:
        del dropout._modules["late_module"]
    else:
        dropout.late_module = nn.Linear(1, 1)


def _rename_module(m: nn.Module) -> None:
    table = m[1]._modules
    _rename(table, *(("1", "one") if "1" in table else ("one", "1")))


def _rename_parameter(m: nn.Module) -> None:
    table = m[2]._parameters
    _rename(table, *(("weight", "mass") if "weight" in table else ("mass", "weight")))


def _swap_modules(m: nn.Module) -> None:
    """The same modules in another order, which calls them so."""
    table = m[1]._modules
    first = next(iter(table))
    table[first] = table.pop(first)


def _tie(m: nn.Module) -> None:
    inner = m[1][0]
    inner.weight = nn.Parameter(inner.weight.detach().clone()) if inner.weight is m[0].weight else m[0].weight


def _new_table(m: nn.Module) -> None:
    vars(m[1][2])["_parameters"] = {n: nn.Parameter(p.detach().clone()) for n, p in m[1][2]._parameters.items()}


def _same_class(m: nn.Module) -> None:
    m[2].__class__ = Other if type(m[2]) is Scaled else Scaled


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "all train or none": lambda m: m.train(not m.training),
    "one module's mode": lambda m: setattr(m[1][1], "training", not m[1][1].training),
    "requires_grad": _requires,
    "a number": lambda m: _toggle(m[1][0], "scale", 0.5, 0.25),
    "a dropout's rate": lambda m: _toggle(m[1][1], "p", 0.1, 0.2),
    "a text": lambda m: _toggle(m[2], "how", "mean", "sum"),
    "its type alone": lambda m: _toggle(m[1][0], "times", 1, True),
    "its type alone, a fraction": lambda m: _toggle(m[1][0], "times", 1, 1.0),
    "a flag that becomes a number": lambda m: _toggle(m[1][0], "on", True, 1),
    "nothing that becomes a number": lambda m: _toggle(m[1][0], "nothing", None, 0),
    "what is no plain value becomes one": lambda m: _toggle(m[1][0], "things", [], 0),
    "an attribute's name": lambda m: _rename_attribute(m[2]),
    "an attribute comes or goes": lambda m: _drop_or_add(m[2]),
    "an attribute that steers nothing": lambda m: _toggle(m[1][0], "things", [], [1]),
    "a forward hook": lambda m: m[1][0].register_forward_hook(hook),
    "a forward hook before": lambda m: m[1].register_forward_pre_hook(hook),
    "a backward hook": lambda m: m[2].register_full_backward_hook(hook),
    "a hook that moves": _move_hook,
    "a hook of a tensor": lambda m: m[1][2].weight.register_post_accumulate_grad_hook(hook),
    "another kind of it": lambda m: m[1][0].weight.register_hook(hook),
    "a hook of a tensor that moves": _move_tensor_hook,
    "hooks go": lambda m: [module._forward_hooks.clear() for module in m.modules()],
    "an equal module": lambda m: m[1]._modules.__setitem__(next(iter(m[1]._modules)), Scaled()),
    "an equal parameter": lambda m: _replace(m[1][2], "weight"),
    "an equal parameter, no longer tied": lambda m: _replace(m[0], "weight"),
    "an equal buffer": lambda m: _replace(m[2], "running"),
    "a buffer comes or goes": _new_buffer,
    "a parameter comes or goes": _new_parameter,
    "a module comes or goes": _new_module,
    "a buffer that was None": _buffer_none,
    "a parameter that was None": _parameter_none,
    "a module's name": _rename_module,
    "a parameter's name": _rename_parameter,
    "the order of modules": _swap_modules,
    "ties": _tie,
    "a table": _new_table,
    "a class": _same_class,
    "a forward of its own": lambda m: _put_forward(m[1][0]),
    "another forward of its own": lambda m: _other_forward(m[2]),
    "a shape": _narrow,
    "a dtype": _retype,
    "numbers": lambda m: m[0].weight.data.add_(1),
    "nothing": hook,
}  # fmt: skip
"""What may happen to a model between two steps."""

ALIKE = frozenset((
    "an attribute that steers nothing", "an equal module", "an equal parameter", "an equal buffer",
    "a table", "numbers", "nothing", "hooks go",
))  # fmt: skip
"""After these a signature says what it said."""

SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another type of autocast": lambda: torch.autocast("cpu", torch.float16),
    "kernels of attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "oneDNN": lambda: _without_onednn(),
    "the default dtype": lambda: _default_dtype(torch.float64),
    "deterministic algorithms": lambda: _deterministic(),
    "hooks of all modules": lambda: _global_hook(),
}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _global_hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def assert_as_fresh(watch: ModelWatch, m: nn.Module, what: str) -> None:
    """Equal with types (1 is no True), and the same object the next time."""
    found, fresh = watch.signature(), model_signature(m)
    assert found == fresh, what
    assert found.to_json() == fresh.to_json(), what
    assert watch.signature() is found, what
    assert [*watch.tree.modules] == [*m.modules()]
    for mine, theirs in ((watch.tree.parameters, m.named_parameters()), (watch.tree.buffers, m.named_buffers())):
        now = dict(theirs)
        assert list(mine) == list(now), what
        assert all(mine[name] is now[name] for name in now), what


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str) -> None:
    """And made undone, or made again."""
    m = model()
    watch = ModelWatch(m)
    before = watch.signature()
    assert watch.signature() is before
    CHANGES[what](m)
    assert_as_fresh(watch, m, what)
    assert (watch.signature().to_json() == before.to_json()) == (what in ALIKE)
    CHANGES[what](m)
    assert_as_fresh(watch, m, f"{what}, again")


@pytest.mark.parametrize("what", ["an attribute that steers nothing", "hooks go", "numbers", "nothing"])
def test_what_changes_nothing_gives_the_same_object(what: str) -> None:
    m = model()
    watch = ModelWatch(m)
    before = watch.signature()
    CHANGES[what](m)
    assert watch.signature() is before


@pytest.mark.parametrize("what", SWITCHES)
def test_a_global_switch_is_seen(what: str) -> None:
    m = model()
    watch = ModelWatch(m)
    before = watch.signature()
    with SWITCHES[what]():
        assert_as_fresh(watch, m, what)
        assert watch.signature() != before
    assert_as_fresh(watch, m, what)
    assert watch.signature() == before


@settings(max_examples=examples(300))
@given(st.lists(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=3), min_size=1, max_size=8))
def test_any_changes(turns: list[list[str]]) -> None:
    """One after the other and several at once. What has gone may leave its address to what comes."""
    m = model()
    watch = ModelWatch(m)
    watch.signature()
    for changes in turns:
        for what in changes:
            with contextlib.suppress(AttributeError, KeyError, RuntimeError):  # another change has made it impossible
                CHANGES[what](m)
        assert_as_fresh(watch, m, f"{changes} of {turns}")


def test_an_address_that_is_used_again() -> None:
    """A parameter that goes, and another of the same size that comes where it was."""
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    watch = ModelWatch(m)
    for turn in range(20):
        watch.signature()
        trains = bool(turn % 2)
        del m[0]._parameters["weight"]
        m[0].weight = nn.Parameter(torch.zeros(3, 3), requires_grad=trains)
        assert_as_fresh(watch, m, f"turn {turn}")
        assert dict(watch.tree.parameters)["0.weight"].requires_grad is trains


def test_a_change_that_another_has_seen_first() -> None:
    """Programs look at the same tree: what they find must not pass the signature by."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watch = ModelWatch(model)
    before = watch.signature()
    model.append(nn.Linear(2, 2))
    watch.tree.look()  # as a program does that is called by itself
    assert watch.signature() == model_signature(model) != before
    del model[0]
    watch.tree.look()
    assert watch.signature() == model_signature(model)
