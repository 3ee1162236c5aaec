"""A rank's measured peak under a plan is what the plan says, from above and from below, where it is no small number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import MIB
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.matrix import some
from tests.sharding.processes import on_ranks

LEAST = 50 * MIB
"""Of a rank: 2% of it are one MiB, so that smaller steps would show little."""

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 4, "n_embd": 512, "n_head": 4, "n_positions": 64, "vocab_size": 1024},
    "llama": {
        "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 1024, "max_position_embeddings": 64, "vocab_size": 2048,
    },
}  # fmt: skip

STEPS = 2


@dataclass
class Peak:
    """What one rank found.

    Attributes:
        predicted, measured: bytes.
        budget: of the plan.
    """

    predicted: int
    measured: int
    budget: int


def _peak(architecture: str, budget: str, stores: Path) -> Peak:
    model = build_model(architecture, SHAPES[architecture], seed=0)
    batch = sample_batch(model, 4, 64, dist.get_rank())
    step = fit(
        model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), device_budget=budget, cache_dir=stores,
        quick=True, group=dist.group.WORLD, check="never", say=lambda text: None,
    )  # fmt: skip
    for _ in range(STEPS):
        step(batch)
    measured = step.measure(batch)
    return Peak(step.plan.device_peak_bytes, measured.peak_bytes, step.plan.device_budget_bytes)


@pytest.mark.parametrize(
    ("architecture", "budget"),
    some(
        [("gpt2", "110%"), ("gpt2", "70%"), ("gpt2", "60%"), ("llama", "110%"), ("llama", "65%")],
        keep=[("gpt2", "70%")],
    ),
)
def test_a_peak_is_within_two_hundredths_of_what_was_predicted(
    architecture: str, budget: str, fit_stores: Path
) -> None:
    for found in on_ranks(2, _peak, architecture, budget, fit_stores):
        assert found.measured >= LEAST, found
        assert found.measured <= found.budget, found
        assert abs(found.predicted - found.measured) <= max(0.02 * found.predicted, MIB), found


class Small(nn.Module):
    """Sizes that two ranks do not divide, one for each type: what stands for them between steps is small, but there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(16, 33))
        self.second = nn.Linear(33, 16)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.second(torch.tanh(self.first(x)))
        loss: torch.Tensor = out.square().mean() * self.scale.sum().float()
        return loss


def _small_peak(stores: Path) -> Peak:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(256, 16)  # activations decide, no scatter
    step = fit(
        model, x, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), device_budget="100%", cache_dir=stores,
        loss=lambda out, batch: out, quick=True, group=dist.group.WORLD, say=lambda text: None,
    )  # fmt: skip
    for _ in range(STEPS):
        step(x)
    return Peak(step.plan.device_peak_bytes, step.measure(x).peak_bytes, step.plan.device_budget_bytes)


def test_a_small_step_takes_no_byte_more_than_predicted(fit_stores: Path) -> None:
    for found in on_ranks(2, _small_peak, fit_stores):
        assert found.predicted - 64 <= found.measured <= found.predicted, found
