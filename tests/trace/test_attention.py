"""Attention whose kernels PyTorch chooses by whether its mask requires gradients: its bits in both cases."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from stowage.stages.kernels.attention import attention, attention_gradients
from stowage.stages.trace.recording.kernels_by_training import kernels_by_training

LENGTHS = st.integers(1, 9)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


class Given(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor
    scale: float | None


@st.composite
def arguments(draw: Any) -> Given:
    """Heads as models make them: behind one another, or out of one tensor whose heads are turned to the front."""
    dtype, batch, heads, width = draw(DTYPES), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(LENGTHS)
    rows, columns = draw(LENGTHS), draw(LENGTHS)
    turned = draw(st.booleans())

    def made(length: int, own_width: int) -> torch.Tensor:
        if turned:
            return torch.randn(batch, length, heads, own_width, dtype=dtype).transpose(1, 2)
        return torch.randn(batch, heads, length, own_width, dtype=dtype)

    shape = (*draw(st.sampled_from([(), (1, 1), (1, heads), (batch, 1), (batch, heads)])), rows, columns)
    mask = torch.randn(*shape, dtype=dtype)
    if draw(st.booleans()):
        mask = mask.mT.contiguous().mT
    other_width = draw(st.sampled_from([width, width + 1]))
    return Given(
        made(rows, width), made(columns, width), made(columns, other_width), mask, draw(st.sampled_from([None, 0.3]))
    )


def by_autograd(own: Given, gradient: torch.Tensor, trains: bool) -> list[torch.Tensor]:
    query, key, value = (t.detach().requires_grad_() for t in own[:3])
    mask = own.mask.detach().requires_grad_(trains)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=own.scale)
    wanted = [query, key, value, *([mask] if trains else [])]
    return [result, *torch.autograd.grad(result, wanted, gradient)]


@given(arguments(), st.booleans(), st.booleans())
def test_bits_are_those_of_autograd(own: Given, trains: bool, turned: bool) -> None:
    gradient = torch.randn(*own.query.shape[:-1], own.value.shape[-1], dtype=own.query.dtype)
    if turned:
        gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    expected, as_trained = by_autograd(own, gradient, trains), by_autograd(own, gradient, True)
    for own_layout in (True, False):
        last = [], trains
        found = [attention(*own, own_layout, *last), *attention_gradients(gradient, *own, [own_layout] * 3, *last)]
        for one, other, like in zip(found, expected, expected if own_layout else as_trained):
            assert torch.equal(one, other)
            assert one.stride() == like.stride()


def test_the_two_kernels_differ() -> None:
    torch.manual_seed(0)
    own = Given(*(torch.randn(2, 3, 40, 16) for _ in range(3)), torch.randn(40, 40), None)
    assert not torch.equal(attention(*own, True, [], True), attention(*own, True, [], False))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("own_layout", [True, False])
@pytest.mark.parametrize("width", [4, 7], ids=["fused if frozen", "never fused"])
def test_fake_kernels(width: int, own_layout: bool, trains: bool) -> None:
    turned = torch.randn(2, 5, 3, 4).transpose(1, 2)
    own = Given(turned, torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, width), torch.randn(3, 5, 6)[None], 0.2)
    gradient = torch.randn(2, 3, 5, width)
    for operator, given_ in (
        (attention, (*own, own_layout, [own.mask], trains)),
        (attention_gradients, (gradient, *own, [own_layout] * 3, [], trains)),
    ):
        torch.library.opcheck(operator, given_, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "changed",
    [
        {"attn_mask": None},
        {"dropout_p": 0.5},
        {"is_causal": True, "attn_mask": None},
        {"enable_gqa": True},
        {"scale": -1.0},
    ],
    ids=str,
)
def test_what_the_operators_do_not_do_is_left_alone(changed: dict[str, Any]) -> None:
    query, bias = torch.randn(2, 4, 5, 8, requires_grad=True), torch.randn(5, 5, requires_grad=True)

    def attended() -> torch.Tensor:
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(query, query, query, **{"attn_mask": bias, **changed})

    plain = attended()
    with kernels_by_training():
        assert torch.equal(attended(), plain)
