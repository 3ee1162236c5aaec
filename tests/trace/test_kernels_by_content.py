"""Operators whose kernels PyTorch chooses by what tensors contain: eager's bits, traced or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from stowage.flows import fit
from stowage.stages.ir.errors import TraceError
from stowage.stages.kernels import prod_gradient
from tests.api.beside_plain import WIDTH, Script, adamw, mlp, rows, trains_equally

WEIGHT = torch.rand(WIDTH, generator=torch.Generator().manual_seed(3)) + 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("zeros", [(), ((1, 2),), ((1, 2), (1, 4)), ((0, 0), (3, 1))])
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_the_gradient_of_a_product_is_eagers(
    dtype: torch.dtype, zeros: Any, dim: int | None, keepdim: bool, turned: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6, dtype=dtype)
    for place in zeros:
        x[place] = 0
    x = (x.mT.contiguous().mT if turned else x).requires_grad_()
    product = x.prod() if dim is None else x.prod(dim, keepdim)
    gradient = torch.randn_like(product)
    (expected,) = torch.autograd.grad(product, x, gradient)
    found = prod_gradient(gradient, x.detach(), product.detach(), dim, keepdim and dim is not None)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(), (1,), (4, 1)])
def test_few_elements(shape: tuple[int, ...]) -> None:
    for value in (0.0, 1.5):
        x = torch.full(shape, value, requires_grad=True)
        product = x.prod(-1)
        (expected,) = torch.autograd.grad(product.sum(), x)
        assert torch.equal(prod_gradient(torch.ones_like(product), x.detach(), product.detach(), -1, False), expected)


def of_classes(**how: Any) -> Callable[[Any, Any], torch.Tensor]:
    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        target = (batch[:, 0].abs() * 100).long() % WIDTH
        return F.cross_entropy(
            outputs, torch.where(batch[:, 1] > 1.0, how.get("ignore_index", -100), target), weight=WEIGHT, **how
        )

    return loss


def with_zeros(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """A third of the rows has one zero, a few have more."""
    return (outputs.sigmoid() * (batch > -1.5)).prod(1).mean() + (outputs[:2].tanh() + 1.5).prod()


def of_integers(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    counts = (batch.abs() + 1).long().prod(1) + (batch > 0).prod(1)
    return (outputs.double().prod(1, dtype=torch.float32) * counts).pow(2).mean()


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "smoothed": of_classes(label_smoothing=0.1),
    "another class ignored": of_classes(label_smoothing=0.1, ignore_index=2),
    "not smoothed": of_classes(),
    "sum": of_classes(label_smoothing=0.1, reduction="sum"),
    "product": with_zeros,
    "product of integers": of_integers,
}


@pytest.mark.exactness
@pytest.mark.parametrize("name", LOSSES)
def test_trains(name: str) -> None:
    def make() -> Script:
        model = mlp()
        return Script(model, adamw(model), LOSSES[name], rows())

    trains_equally(make, "85%")


@pytest.mark.parametrize("name", ["smoothed", "product"])
def test_the_comparison_with_plain_pytorch_takes_eagers_kernels_too(name: str, fit_stores: Path) -> None:
    model, batches = mlp(), rows(6)
    how: dict[str, Any] = {"device_budget": "85%", "cache_dir": fit_stores, "quick": True, "check": "gradients"}
    step = fit(model, batches[0], adamw(model), loss=LOSSES[name], **how)
    for batch in batches:
        step(batch)


def traced(loss: Callable[[Any, Any], torch.Tensor]) -> None:
    from stowage.stages.trace.step import trace_step

    model = nn.Linear(WIDTH, WIDTH)
    trace_step(model, (torch.randn(4, WIDTH),), loss=lambda outputs, batch: loss(outputs, batch))


def test_values_that_train_are_not_filled_in() -> None:
    for fill in (torch.Tensor.masked_fill, lambda x, *how: (x * 1).masked_fill_(*how)):
        with pytest.raises(TraceError, match=r"masked_fill.*torch\.where\(mask, value, x\)"):
            traced(lambda outputs, batch, fill=fill: fill(outputs, batch[0] > 0, outputs.mean()).sum())  # type: ignore[misc]
    traced(lambda outputs, batch: outputs.masked_fill(batch[0] > 0, torch.tensor(2.0)).sum())


def test_second_derivatives_of_products_are_refused() -> None:
    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(outputs.prod(1).sum(), outputs, create_graph=True)
        return gradient.pow(2).sum()

    with pytest.raises(TraceError, match="second derivative of prod"):
        traced(loss)


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


KNOWN = {"masked_fill", "prod", "masked.prod", "linalg.lstsq", "linalg.lstsq.grad_oriented"}
"""What differs under a mode: refused, or replaced."""


def computed(op: Any, sample: Any) -> list[torch.Tensor]:
    """An operator's results and gradients."""

    def copied(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return item.detach().clone(memory_format=torch.preserve_format).requires_grad_(item.requires_grad)

    given = tree_map(copied, (sample.input, sample.args, sample.kwargs))
    leaves = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.manual_seed(0)
    out = sample.output_process_fn_grad(op(given[0], *given[1], **given[2]))
    results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    ends = [t for t in results if t.requires_grad]
    found = torch.autograd.grad(ends, leaves, [torch.randn_like(t) for t in ends], allow_unused=True) if ends else ()
    return [t.detach() for t in (*results, *found) if t is not None and t.layout == torch.strided]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    same = (a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(one, other))
    return len(one) == len(other) and all(same)


@pytest.mark.long
def test_no_other_operator_differs_under_a_mode() -> None:
    """All operators with their gradients that PyTorch's own tests have samples of."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    differing = set()
    for op in op_db:
        if torch.float32 not in op.dtypes:
            continue
        for sample in list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))[:40]:
            try:
                plain, again = computed(op, sample), computed(op, sample)
            except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
                continue
            if not alike(plain, again):
                continue
            with Passing():  # type: ignore[no-untyped-call]
                if not alike(plain, computed(op, sample)):
                    differing.add(op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""))
    assert differing <= KNOWN
