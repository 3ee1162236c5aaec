"""Whether attention has a mask is decided as eager decides it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.trace import trace_step
from stowage.stages.workload.models import build_model
from tests.zoo import LLAMA

LENGTH = 16


class Positioned(nn.Module):
    """A model that makes the positions itself: one sequence a row, or two."""

    def __init__(self, sequences: int) -> None:
        super().__init__()
        self.model = build_model("llama", LLAMA, seed=0)
        self.sequences = sequences

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH, device=input_ids.device) % (LENGTH // self.sequences)
        outputs: Any = self.model(input_ids=input_ids, labels=input_ids, position_ids=positions[None])
        loss: torch.Tensor = outputs.loss
        return loss


def masks_of(model: nn.Module, batch: Any) -> tuple[set[bool], set[bool]]:
    """Whether attention was given a mask: in eager, in the trace."""
    attention: Any = nn.functional.scaled_dot_product_attention
    eager: set[bool] = set()

    def spy(*arguments: Any, **more: Any) -> torch.Tensor:
        eager.add(more["attn_mask"] is not None)
        result: torch.Tensor = attention(*arguments, **more)
        return result

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "scaled_dot_product_attention", spy)
        model(**batch) if isinstance(batch, dict) else model(batch)
    trace = trace_step(model, batch)
    calls = [c for c in trace.calls if "attention" in c.target and c.phase == "forward"]
    return eager, {'"attn_mask":{"value"' in c.arguments for c in calls}


@pytest.mark.parametrize(("sequences", "masked"), [(1, False), (2, True)])
def test_positions_of_the_model_are_looked_at(sequences: int, masked: bool) -> None:
    ids = torch.randint(64, (2, LENGTH))
    assert masks_of(Positioned(sequences), ids) == ({masked}, {masked})


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral"])
def test_usual_models_have_no_mask(architecture: str) -> None:
    small = (
        LLAMA
        if architecture != "gpt2"
        else {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "attn_pdrop": 0.0}
    )
    model = build_model(architecture, small, seed=0)
    ids = torch.randint(64, (2, LENGTH))
    assert masks_of(model, {"input_ids": ids, "labels": ids.clone()}) == ({False}, {False})


@pytest.mark.parametrize(("sequences", "masked"), [(1, False), (2, True)])
def test_positions_of_the_batch_are_looked_at(sequences: int, masked: bool) -> None:
    """Whether they are packed belongs to the signature of the batch."""
    model = build_model("llama", LLAMA, seed=0)
    ids = torch.randint(64, (2, LENGTH))
    positions = (torch.arange(LENGTH) % (LENGTH // sequences)).expand(2, -1).contiguous()
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}
    assert masks_of(model, batch) == ({masked}, {masked})


@pytest.mark.parametrize("padding", [0, 3])
def test_masks_of_the_batch_are_looked_at(padding: int) -> None:
    """Likewise whether they mask anything."""
    model = build_model("llama", LLAMA, seed=0)
    ids = torch.randint(64, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, LENGTH - padding :] = 0
    masked = {bool(padding)}
    assert masks_of(model, {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}) == (masked, masked)
