"""Kernels of a step run below autograd; what is the user's, inside of a step or around it, finds PyTorch as outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stowage.stages.runtime.dispatch import OutsideDispatch, below_autograd
from stowage.stages.runtime.executors.iteration import SingleIteration
from stowage.stages.workload.randomness import seeded
from tests.runtime.beside_eager import eager_step, prepare, program_of, same
from tests.zoo import Entry


def state() -> tuple[str, str, bool]:
    """How this thread's calls are dispatched."""
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return str(keys[0]), str(keys[1]), torch.is_grad_enabled()


def works() -> bool:
    """Whether autograd does."""
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = (x * 3).sum()
        if not y.requires_grad:
            return False
        (found,) = torch.autograd.grad(y, x)
    return bool((found == 3).all())


def build() -> Entry:
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 6))
        batch = {"input": torch.randn(5, 6)}
    return model, batch, lambda outputs, _: outputs.pow(2).mean()


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_below_and_outside_again() -> None:
    before = state()
    outside = OutsideDispatch()
    with below_autograd():
        inside = state()
        assert inside != before
        assert not works()
        with outside.again():
            assert state() == before
            assert works()
            with below_autograd():
                assert state() == inside
            assert state() == before
        assert state() == inside
        with pytest.raises(RuntimeError, match="here"), outside.again():
            raise RuntimeError("here")
        assert state() == inside
    assert state() == before


class Curious(torch.optim.SGD):
    """Its step differentiates something, as those that estimate curvature do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                with torch.enable_grad():
                    x = p.detach().requires_grad_(True)
                    (slope,) = torch.autograd.grad((x**3).sum(), x)
                with torch.no_grad():
                    p.sub_(0.01 * p.grad + 1e-4 * slope)


def trained(optimizer: Callable[[nn.Module], torch.optim.Optimizer], change: Any = None) -> None:
    """Beside plain PyTorch."""
    (eager, batch, loss), (model, _, _) = build(), build()
    one, two = optimizer(eager), optimizer(model)
    prepared = prepare(build, optimizer)
    program = program_of(prepared, prepared.smallest(), model, two)
    for changed, held in ((eager, one), (model, two)):
        if change is not None:
            change(changed, held)
    for _ in range(3):
        expected = eager_step(eager, batch, loss, one)
        before = state()
        assert same(program(batch).detach(), expected)
        assert state() == before
        assert all(same(a.detach(), b.detach()) for a, b in zip(eager.parameters(), model.parameters(), strict=True))


def test_an_optimizer_that_differentiates() -> None:
    trained(lambda model: Curious(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", ["gradient", "before the step", "after the step"])
def test_hooks_find_autograd(kind: str) -> None:
    found: list[tuple[bool, bool, tuple[str, str]]] = []

    def look(*args: Any) -> None:
        found.append((works(), torch.is_grad_enabled(), state()[:2]))

    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if kind == "gradient":
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(look)
        elif kind == "before the step":
            optimizer.register_step_pre_hook(look)
        else:
            optimizer.register_step_post_hook(look)

    trained(plain_sgd, change)
    assert len(found) >= 6
    assert all(one for one, _, _ in found)
    half = [(enabled, keys) for _, enabled, keys in found]
    eager, mine = set(half[: len(half) // 2]), set(half[len(half) // 2 :])
    assert {enabled for enabled, _ in mine} == {enabled for enabled, _ in eager} == {kind != "gradient"}
    assert {keys for _, keys in mine} == {state()[:2]}


def planned(optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = plain_sgd) -> tuple[Any, nn.Module, Any]:
    """A program, its model and a batch."""
    model, batch, _ = build()
    made = optimizer(model) if optimizer else None
    prepared = prepare(build, optimizer)
    return program_of(prepared, prepared.smallest(), model, made), model, batch


def test_kernels_run_below_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each call looks for gradients for nothing."""
    seen: list[bool] = []

    def begin(run: SingleIteration, label: str) -> None:
        seen.append("AutogradOther" in str(torch._C._dispatch_tls_local_exclude_set()))

    monkeypatch.setattr(SingleIteration, "begin", begin)
    program, _, batch = planned(None)
    program(batch)
    assert seen
    assert all(seen)


def test_a_dispatch_mode_around_a_step_sees_every_kernel() -> None:
    class Notes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(str(func))
            return func(*args, **(kwargs or {}))

    program, _, batch = planned()
    alone = program(batch)
    program, model, batch = planned()
    before = state()
    notes = Notes()
    with notes:
        assert same(program(batch), alone)
    assert state() == before
    counts = {
        kind: sum(kind in call for call in notes.calls) for kind in ("addmm", "mm.default", "_foreach_add_", "add_")
    }
    assert counts["addmm"] >= 2, "of forward"
    assert counts["mm.default"] >= 3, "of backward"
    assert counts["_foreach_add_"] + counts["add_"] >= len(list(model.parameters())), "of the optimizer"


def test_a_function_mode_around_a_step_sees_the_optimizer_alone() -> None:
    """The calls of a trace were recorded below such modes: a default device, say, must not change what they make."""

    class Notes(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    program, _, batch = planned()
    before = state()
    with Notes() as notes:
        program(batch)
    assert state() == before
    assert not {n for n in notes.names if "mm" in n}, "kernels of the step"
    assert "_foreach_add_" in notes.names or "add_" in notes.names, "the optimizer's"


class Breaks(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("in the optimizer")


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    def hook(parameter: Any) -> None:
        raise RuntimeError("in a hook")

    next(iter(model.parameters())).register_post_accumulate_grad_hook(hook)
    return plain_sgd(model)


def before_step(model: nn.Module) -> torch.optim.Optimizer:
    def hook(*args: Any) -> None:
        raise RuntimeError("in a step hook")

    optimizer = plain_sgd(model)
    optimizer.register_step_pre_hook(hook)
    return optimizer


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda model: Breaks(model.parameters(), lr=1.0), "in the optimizer"),
        (hooked, "in a hook"),
        (before_step, "in a step hook"),
    ],
)
def test_what_raises_inside_leaves_the_thread_as_it_was(make: Any, where: str) -> None:
    model, batch, _ = build()
    prepared = prepare(build, plain_sgd)
    program = program_of(prepared, prepared.smallest(), model, make(model))
    before = state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=where):
            program(batch)
        assert state() == before
        assert works()


def test_a_kernel_that_raises_leaves_the_thread_as_it_was() -> None:
    program, _, batch = planned()
    before = state()
    wrong = {"input": batch["input"][:, :1]}
    with pytest.raises(RuntimeError, match=r"shape|size"):
        program(wrong)
    assert state() == before
    assert works()
