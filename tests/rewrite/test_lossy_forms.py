"""Values of 16 bits, what a layer normalisation that never trains reads, and q, k and v, kept in fewer bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stowage.stages.ir.lossy import KINDS
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import REWRITES, rewritten
from stowage.stages.rewrite.lossy import CODECS, Classes
from stowage.stages.sensitivity import StepTensors, gradient_error, run_trace
from stowage.stages.trace import trace_step
from tests.rewrite.packed_by_hooks import Chosen, hooked

ROWS, WIDTH = 48, 64

GENERAL = set(KINDS) - {"fixed8_unit", "relu1bit", "gelu2bit", "silu2bit", "top10"}
"""The kinds that are for any value."""


class Normalised(nn.Module):
    """Layers with normalisations that do not train, as in the base model under LoRA."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return x.square().mean()


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def traced(module: nn.Module, x: torch.Tensor) -> TraceTables:
    return trace_step(module, (x,), loss=lambda value, _: value)


def equal_to_hooks(module: nn.Module, reference: nn.Module, x: torch.Tensor, kind: str) -> TraceTables:
    """Check that gradients are those of plain PyTorch with hooks, and return the rewritten trace."""
    trace = traced(module, x)
    packed = REWRITES[kind].everywhere(trace)
    _, found = run_trace(packed, StepTensors.of(module, (x,)))
    chosen = Chosen.of(trace, kind)
    with hooked(chosen) as mode:
        reference(x).backward()
    assert mode.used == set(chosen.packed)
    trained = [(n, p) for n, p in reference.named_parameters() if p.grad is not None]
    assert trained
    assert [n for n, p in trained if not torch.equal(p.grad, found[n])] == []
    return packed


def frozen(module: nn.Module) -> nn.Module:
    for norm in module.norms:
        norm.requires_grad_(False)
    return module


def test_the_largest_tenth_of_a_frozen_normalisation() -> None:
    x = batch()
    module = frozen(Normalised())
    trace = traced(module, x)
    assert len(REWRITES["top10"].sites(trace)) == 2, "the first reads the batch, which is there anyway"
    equal_to_hooks(module, frozen(Normalised()), x, "top10")
    made = rewritten(trace, "top10[0]")
    new = [s for s in made.storages if s.storage >= len(trace.storages) and s.name.endswith(("codes", "indices"))]
    assert sum(s.nbytes for s in new) == 2 * 4 * int(0.1 * ROWS * WIDTH)
    live = [StepTensors.of(module, (x,))]
    assert 0 < gradient_error(trace, made, live) < 0.5


def test_it_is_for_frozen_normalisations_alone() -> None:
    assert REWRITES["top10"].sites(traced(Normalised(), batch())) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_of_every_type(dtype: torch.dtype) -> None:
    """What is computed again of one value is not packed beside it, though each could be packed alone."""
    x = batch(dtype)
    trace = traced(Normalised(dtype), x)
    tried = set[str]()
    for kind in KINDS:
        if not REWRITES[kind].sites(trace):
            continue
        packed = equal_to_hooks(Normalised(dtype), Normalised(dtype), x, kind)
        codes = [s for s in packed.storages if s.name.endswith("_codes") and s.storage >= len(trace.storages)]
        whole = [s for s in codes if s.nbytes == ROWS * WIDTH * CODECS[kind].bits / 8]
        assert len(whole) == len(REWRITES[kind].sites(trace))
        tried.add(kind)
    assert tried == GENERAL - ({"bf16"} if dtype != torch.float32 else set()), "elsewhere it would have as many bits"
    kinds = {kind for kind, _ in Classes(trace).members(KINDS)}
    assert ("bf16" in kinds) == (dtype == torch.float32)


class Attention(nn.Module):
    """Fused attention of q, k and v that are three tensors, and what follows from it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 32)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("kind", ["bf16", "int8_tensor", "int4_group"])
def test_q_k_and_v_are_packed_together(kind: str) -> None:
    x = torch.randn(3, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    trace = traced(Attention(), x)
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    (q,) = (c.call for c in trace.calls if c.target == attention)
    packed = equal_to_hooks(Attention(), Attention(), x, kind)
    assert len([s for s in packed.storages if s.name.endswith("_codes")]) == 3 + 1, "q, k, v, and the output's error"
    assert len([c for c in packed.calls if c.target == attention and c.phase == "backward"]) == 1
    kept = {trace.values[v].storage for v in trace.calls[q].returns if v >= 0}
    kept |= {trace.values[v].storage for v in trace.calls[q].reads}
    read = {packed.values[v].storage for c in packed.calls if c.phase == "backward" for v in c.reads}
    assert read.isdisjoint(kept), "none of them waits for backward"
