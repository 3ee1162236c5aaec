"""What cannot be planned is refused in one sentence that names the module and the line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.ir.errors import StowageError, TraceError
from stowage.stages.trace import trace_step

X = torch.randn(4, 4)


class Outer(nn.Module):
    """Puts the module at fault one level down, at `inner`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.first(x))


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * x.sum().item()


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x if x.sum() > 0 else -x


class NonZero(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.flatten()[torch.nonzero(x.flatten() > 0)]


class BooleanMask(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x[x > 0]


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 3

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x * self.calls


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        raise ValueError("the user's own mistake\nwith a second line")


class WrongShape(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x @ torch.ones(5, 5)


@torch.library.custom_op("stowage_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class WithoutFake(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.ops.stowage_tests.without_fake(x)


def mean(outputs: Any, batch: Any) -> torch.Tensor:
    del batch
    result: torch.Tensor = outputs.mean()
    return result


def refused(model: nn.Module, batch: Any = X, **more: Any) -> str:
    """The sentence with which a model is refused."""
    with pytest.raises(TraceError) as caught:
        trace_step(model, (batch,), **{"loss": mean, **more})
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize(
    ("inner", "sentence", "line"),
    [
        (Item(), "reads a tensor's value", "x.sum().item()"),
        (Branch(), "reads a tensor's value", "x if x.sum() > 0"),
        (NonZero(), "shape depends on data", "torch.nonzero"),
        (BooleanMask(), "shape depends on data", "x[x > 0]"),
        (WithoutFake(), "without a fake kernel", "without_fake(x)"),
        (Fails(), "ValueError: the user's own mistake.", 'raise ValueError("the'),
        (WrongShape(), "cannot be traced", "x @ torch.ones(5, 5)"),
    ],
)
def test_faults_in_forward(inner: nn.Module, sentence: str, line: str) -> None:
    text = refused(Outer(inner))
    assert sentence in text
    assert "Module 'inner'" in text
    place = re.search(r"\((\S+):(\d+)\)", text)
    assert place, text
    assert place[1] == __file__
    with open(place[1], encoding="utf-8") as file:
        assert line in file.read().splitlines()[int(place[2]) - 1]


def test_a_number_that_forward_changes_and_reads() -> None:
    inner = Counter()
    before = dict(vars(inner))
    text = refused(Outer(inner))
    assert "changes Outer.inner" in text
    assert "calls and the step depends on it" in text
    assert re.search(rf"{re.escape(__file__)}:\d+", text)
    assert vars(inner) == before, "put back as it was"


class ReplacesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        self.scale = nn.Parameter(self.scale * 0.5)
        return x * self.scale


class ReplacesData(ReplacesParameter):
    def forward(self, x: torch.Tensor) -> Any:
        self.scale.data = self.scale.data * 0.5
        return x * self.scale


@pytest.mark.parametrize("inner", [ReplacesParameter(), ReplacesData()])
def test_a_parameter_that_is_replaced(inner: ReplacesParameter) -> None:
    before, content = inner.scale, inner.scale.detach().clone()
    text = refused(Outer(inner))
    assert "is replaced in forward" in text
    assert "copy_(" in text
    assert inner.scale is before
    assert torch.equal(inner.scale, content)


class DistributedDataParallel(nn.Module):
    """Stands in for the wrapper, which needs a process group to be made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.fixture
def ddp() -> Iterator[type[nn.Module]]:
    module = DistributedDataParallel.__module__
    DistributedDataParallel.__module__ = "torch.nn.parallel.distributed"
    yield DistributedDataParallel
    DistributedDataParallel.__module__ = module


def test_wrappers(ddp: type[nn.Module]) -> None:
    compiled = Outer(torch.compile(nn.Linear(4, 4)))  # type: ignore[arg-type]
    text = refused(compiled)
    assert "Module 'inner'" in text
    assert "torch.compile" in text
    assert "Module 'DistributedDataParallel'" in refused(ddp(nn.Linear(4, 4)))
    assert "Module 'DataParallel'" in refused(nn.DataParallel(nn.Linear(4, 4)))


def test_a_class_of_ones_own_with_a_wrappers_name_is_no_wrapper() -> None:
    class DataParallel(nn.Linear):
        pass

    trace_step(DataParallel(4, 4), (X,), loss=mean)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda outputs, batch: outputs, r"must be one number, but it is \(4, 4\)"),
        (lambda outputs, batch: 3.0, "must be one number, but it is float"),
        (lambda outputs, batch: outputs.detach().mean(), "depends on no trainable parameter"),
        (None, r"returns a tensor of shape \(4, 4\) without a scalar `loss`"),
    ],
)
def test_losses(loss: Any, sentence: str) -> None:
    assert re.search(sentence, refused(nn.Linear(4, 4), loss=loss))


def test_nothing_trains() -> None:
    assert "depends on no trainable parameter" in refused(nn.Linear(4, 4).requires_grad_(False))


def test_optimizers_that_are_not_per_tensor() -> None:
    model = nn.Linear(4, 4)
    assert "LBFGS needs a closure" in refused(model, optimizer=torch.optim.LBFGS(model.parameters()))

    class NeedsClosure(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return super().step(closure)

    assert "NeedsClosure needs a closure" in refused(model, optimizer=NeedsClosure(model.parameters(), lr=0.1))


def test_half_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Linear(4, 4)
    with pytest.raises(TraceError, match="some real"):
        trace_step(model, (X,), loss=mean)


def test_a_refused_model_trains_on_as_before() -> None:
    """Modes, gradients, hooks and the random state are left alone by an attempt that fails."""
    model = Outer(nn.Sequential(nn.Dropout(0.5), Item()))
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    state = torch.get_rng_state()
    refused(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks
    model(X).sum().backward()
    assert issubclass(TraceError, StowageError)
