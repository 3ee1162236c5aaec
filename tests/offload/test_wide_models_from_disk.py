"""Language models of width 256 train from disk as in plain PyTorch: every weight, state and loss, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from stowage.stages.device.tiers import DiskTier
from stowage.stages.solve import eager_peak_bytes
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.matrix import some
from tests.offload.test_lora_from_disk import MODELS
from tests.offload.test_offloaded_training import OPTIMIZERS
from tests.offload.with_lower_tier import actions, assert_equal_with_lower_tier, solve_with_lower_tier
from tests.runtime.beside_eager import prepare
from tests.zoo import Entry


def language_model(architecture: str) -> Callable[[], Entry]:
    """Builds the same model each time, in training mode."""

    def build() -> Entry:
        model = build_model(architecture, MODELS[architecture][0], seed=0)
        return model, sample_batch(model, 2, 16, 1), None

    return build


@pytest.mark.parametrize(("name", "optimizer"), some(product(MODELS, OPTIMIZERS), keep=[("gpt2", "momentum")]))
def test_equal_to_eager_from_disk(name: str, optimizer: str, tmp_path: Path) -> None:
    build = language_model(name)
    prepared = prepare(build, OPTIMIZERS[optimizer])
    budget = int(0.4 * eager_peak_bytes(prepared.trace, prepared.nodes))
    solved = solve_with_lower_tier(prepared, budget)
    assert solved.summary.device_peak_bytes <= budget
    assert actions(solved)["offload"] >= 5
    model, _, _ = build()
    tier = DiskTier(tmp_path)
    everything = {n for n, p in model.named_parameters() if p.requires_grad}
    assert_equal_with_lower_tier(build, prepared, solved, tier, OPTIMIZERS[optimizer], moves=everything)
    tier.close()
