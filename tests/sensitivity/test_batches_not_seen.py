"""What is predicted of the gradient's change holds on batches, and draws of dropout, that nothing was measured on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stowage.stages.ir.lossy import MEASURED_BATCHES, Lossy
from stowage.stages.rewrite import rewritten
from stowage.stages.rewrite.lossy import Classes, choices, described
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.sensitivity import StepTensors, gradient_error, gradient_errors
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.solve.synthetic_steps import costs_for
from tests.zoo import ZOO

KINDS = ("bf16", "fixed8", "int8", "int4_group")
LIMITS = (0.003, 0.05)
UNSEEN = 6
SEED = 3
"""Of the weights: with these, of U-Net, one batch tells less of others than with most."""


def another(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a batch of the same form with other content."""
    draws = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=draws)
        return torch.randint(0, int(tensor.max()) + 1, tensor.shape, generator=draws, dtype=tensor.dtype)

    return {name: drawn(t) if isinstance(t, torch.Tensor) else t for name, t in batch.items()}


@pytest.mark.parametrize("measured", [1, MEASURED_BATCHES])
@pytest.mark.parametrize(
    "name", some(["gpt2", "bert", "vit", "resnet", "unet", "lstm", "t5"], keep=["gpt2", "unet", "lstm"])
)
def test_unseen_batches_are_within_what_is_predicted(name: str, measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scale is that of the prediction: the root mean square of the norms of the gradients that were measured."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    torch.manual_seed(SEED)
    model, batch, loss = ZOO[name]()
    trace = trace_step(model, batch, loss=loss)
    seen = [StepTensors.of(model, another(batch, seed)) for seed in range(measured)]
    errors = gradient_errors(trace, KINDS, seen)
    made = [trace, *Classes(trace).everywhere(KINDS)]
    costs = {cost.signature: cost for each in made for cost in costs_for(each).values()}
    tried = 0
    for limit in LIMITS:
        for variant in choices(trace, costs, errors, Lossy(KINDS, limit)):
            predicted = described(trace, variant, errors)[1]
            assert predicted <= limit
            packed = rewritten(trace, variant)
            for seed in range(UNSEEN):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    unseen = StepTensors.of(model, another(batch, 100 + seed))
                    found = gradient_error(trace, packed, [unseen], seen)
                assert 0 < found <= predicted, f"{variant} on batch {seed}"
                tried += 1
    assert tried >= UNSEEN * len(LIMITS)
