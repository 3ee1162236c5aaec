"""Random operations that run again draw what they drew the first time, and the generator does not notice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stowage.flows.planning.by_rules import Rules
from stowage.stages.runtime.random.randomness import RandomStates
from stowage.stages.simulate.replay import RANDOM_STATE_BYTES
from tests.gpu.cases import Case
from tests.gpu.side_by_side import differences, plainly, planned, traced

Draw = Callable[[torch.Tensor], torch.Tensor]


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True)


DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "bernoulli": lambda x: torch.bernoulli(x, 0.5),
    "normal": torch.randn_like,
    "permutation": lambda x: torch.randperm(1000, device=x.device),
    "attention": attention,
}
BACKENDS = {
    "math": (SDPBackend.MATH, torch.float32),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_operations(draw: Draw, device: str) -> None:
    assert_replayed(draw, torch.rand(2, 4, 64, 64, device=device, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_every_kind(backend: str, device: str) -> None:
    """With gradients: backward draws the same mask as forward, whichever forward it follows."""
    kind, dtype = BACKENDS[backend]
    if device == "cpu" and backend != "math":
        pytest.skip("no fused attention of the CPU has dropout")
    x = torch.rand(2, 4, 512, 32, device=device, dtype=dtype)

    def draw(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        with sdpa_kernel(kind):
            attention(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert_replayed(draw, x)


def assert_replayed(draw: Draw, x: torch.Tensor) -> None:
    states = RandomStates(x.device)
    torch.manual_seed(5)
    with states.record(0):
        first = draw(x)
    other = draw(x)
    before = torch.cuda.get_rng_state() if x.is_cuda else torch.get_rng_state()
    with states.replay(0):
        again = draw(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.cuda.get_rng_state() if x.is_cuda else torch.get_rng_state(), before)
    assert states._states[0].nbytes <= RANDOM_STATE_BYTES


@pytest.mark.parametrize("backend", BACKENDS)
def test_recomputed_attention(backend: str, device: str) -> None:
    """Forward attention runs again before its backward, which takes seed and offset of the second run."""
    kind, dtype = BACKENDS[backend]
    if device == "cpu" and backend != "math":
        pytest.skip("no fused attention of the CPU has dropout")
    case = Case("gpt2", device, dtype)
    with sdpa_kernel(kind) if device != "cpu" else nullcontext():
        traced.cache_clear()  # what is traced depends on the kernels that are allowed
        names = {call.target.split(".")[1] for call in traced(case).trace.calls}
        if backend != "math":
            assert f"_scaled_dot_product_{backend}_attention_backward" in names
        assert differences(planned(case, Rules.recompute_all), plainly(case)) == []
    traced.cache_clear()
