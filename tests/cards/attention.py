"""Attention as a card computes it: `scaled_dot_product_attention` calls a fused operator, with seeds of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from stowage.flows.planning.costed import Costed, cost_traces
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.trace import TraceTables
from stowage.stages.profile import CostStore, profile_variants
from stowage.stages.rewrite import variants_of
from stowage.stages.trace import MicroBatch, trace_step
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch

aten: Any = torch.ops.aten
KINDS = ("efficient", "flash", "cudnn")
MODEL = {"n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 128}
CARD = DeviceDescription(
    fingerprint="a-card",
    name="a card",
    type="cuda",
    memory_bytes=1 << 33,
    flops_per_s=1e13,
    memory_copy_bytes_per_s=1e12,
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=1e9,
    disk_duplex_bytes_per_s=1e9,
    update_bytes_per_s=1e12,
    dispatch_s=5e-6,
    offload_bytes_per_s=1e10,
    reload_bytes_per_s=1e10,
    duplex_bytes_per_s=1.6e10,
    cpu_update_bytes_per_s=1e10,
)


@contextmanager
def as_on_a_card(kind: str) -> Iterator[None]:
    """Inside, attention is one fused operator."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **others: Any,
    ) -> torch.Tensor:
        heads = (query, key, value)
        match kind:
            case "efficient":
                found = aten._scaled_dot_product_efficient_attention(
                    *heads, attn_mask, True, dropout_p, is_causal, scale=scale
                )
            case "flash":
                found = aten._scaled_dot_product_flash_attention(*heads, dropout_p, is_causal, False, scale=scale)
            case _:
                found = aten._scaled_dot_product_cudnn_attention(
                    *heads, attn_mask, True, dropout_p, is_causal, False, scale=scale
                )
        out: torch.Tensor = found[0]
        return out

    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def gpt2_on_a_card(kind: str, *, max_grad_norm: float | None = None) -> TraceTables:
    """A step of GPT-2 with dropout, traced here with a card's operators, and said to be of a card."""
    model = build_model("gpt2", MODEL, seed=0)
    if kind != "efficient":  # the others take half precision alone
        model = model.to(torch.bfloat16)
    batch = sample_batch(model, 2, 16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with as_on_a_card(kind):
        trace = trace_step(model, batch, optimizer=optimizer, micro_batch=MicroBatch(max_grad_norm=max_grad_norm))
    return replace(trace, meta=replace(trace.meta, device="cuda"))


def estimated(trace: TraceTables, folder: Path, card: DeviceDescription = CARD) -> Costed:
    """A step with estimates of what it costs, as on a machine without the card."""
    traces = variants_of(trace)
    costs = profile_variants(traces.values(), card, CostStore(folder), costs="roofline")
    return cost_traces(traces, costs, trace, card)
