"""Products whose kernels PyTorch chooses by whether the weight requires gradients: its bits in both cases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stowage.stages.kernels.products import (
    depends_on_training,
    lies_in_columns,
    matmul,
    matmul_input_gradient,
    turned,
    weight_gradient,
)
from stowage.stages.trace.recording.kernels_by_training import kernels_by_training

SIZES = st.integers(1, 9)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def kernels(x: torch.Tensor, weight: torch.Tensor) -> list[str]:
    with Calls() as calls:
        torch.matmul(x, weight)
    return [name for name in calls.found if "mm" in name or "mv" in name]


@st.composite
def factors(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of three or four dimensions in any order, and a vector or matrix; some are parts of others."""
    shape = draw(st.lists(SIZES, min_size=3, max_size=4))
    order, columns, dtype = draw(st.permutations(range(len(shape)))), draw(SIZES), draw(DTYPES)
    laid_out = [shape[i] for i in order]
    x = torch.randn(*laid_out[:-1], laid_out[-1] + draw(st.integers(0, 1)), dtype=dtype)[..., : laid_out[-1]]
    weight = torch.randn(columns, shape[-1], dtype=dtype)
    weight = draw(st.sampled_from([weight.t(), weight.t().contiguous(), weight[0]]))
    x = x.permute([order.index(i) for i in range(len(shape))])
    return x.conj() if draw(st.booleans()) else x, weight.conj() if draw(st.booleans()) else weight


def by_autograd(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, trains: bool, left: bool
) -> list[torch.Tensor]:
    """The product and its gradients, those of a weight on the left turned."""
    vector = weight.dim() == 1
    if left:
        x, weight, gradient = x.mT, turned(weight), gradient if vector else gradient.mT
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_(trains)
    product = torch.matmul(weight, x) if left else torch.matmul(x, weight)
    found = torch.autograd.grad(product, [x, weight] if trains else [x], gradient)
    return [product, *(g.mT if left and g.dim() > 1 else g for g in found)]


@given(factors(), st.booleans(), st.booleans(), st.booleans())
def test_bits_and_layouts_are_those_of_autograd(
    both: tuple[torch.Tensor, torch.Tensor], trains: bool, other_layout: bool, left: bool
) -> None:
    x, weight = both
    if not depends_on_training(x, weight, left=left):
        return
    gradient = torch.randn((*x.shape[:-1], *weight.shape[1:]), dtype=x.dtype)
    if other_layout:
        gradient = gradient.mT.contiguous().mT.conj()
    how = left, lies_in_columns(x, weight)
    found = [matmul(x, weight, left, [], trains), matmul_input_gradient(gradient, weight, *how, True, [], trains)]
    found += [weight_gradient(gradient, x, weight)] if trains else []
    expected = by_autograd(x, weight, gradient, trains, left)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    as_trained = matmul_input_gradient(gradient, weight, *how, False, [], trains)
    assert torch.equal(as_trained, expected[1])
    assert as_trained.stride() == by_autograd(x, weight, gradient, True, left)[1].stride()


@given(factors(), st.booleans())
def test_products_that_depend_on_training(both: tuple[torch.Tensor, torch.Tensor], left: bool) -> None:
    x, weight = both
    trained = weight.detach().requires_grad_()
    if left:
        differ = kernels(turned(weight), x.mT) != kernels(turned(trained), x.mT)
    else:
        differ = kernels(x, weight) != kernels(x, trained)
    assert differ == depends_on_training(x, weight, left=left)


@pytest.mark.parametrize("trains", [True, False])
def test_fake_kernels(trains: bool) -> None:
    x, weight, gradient = torch.randn(3, 6, 4).mT, torch.randn(5, 6).t(), torch.randn(3, 4, 5)
    for how in product((True, False), repeat=3):
        for operator, given_ in (
            (matmul, (x, weight, how[0], [weight], trains)),
            (matmul_input_gradient, (gradient, weight, *how, [weight], trains)),
        ):
            torch.library.opcheck(operator, given_, test_utils=("test_schema", "test_faketensor"))


def test_other_threads_and_what_comes_later_have_the_usual_kernels() -> None:
    x, weight = torch.randn(3, 6, 4).mT, torch.randn(6, 5, requires_grad=True)
    usual = kernels(x, weight)
    with ThreadPoolExecutor(1) as other, kernels_by_training():
        assert other.submit(kernels, x, weight).result() == usual
        with Calls() as calls:
            torch.matmul(x, weight)
    assert calls.found == ["stowage.matmul.default"]
    assert kernels(x, weight) == usual
