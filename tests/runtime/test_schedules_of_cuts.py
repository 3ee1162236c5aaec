"""Training under a schedule that cuts have found changes no number: weights are updated after all that reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stowage.stages.solve import PlanRequest
from stowage.stages.solve.cuts.found import METHOD
from stowage.stages.solve.variants import Variant, solve_variants
from tests.matrix import some
from tests.runtime.beside_eager import MakeOptimizer, adamw, assert_equal_training, prepare
from tests.zoo import ZOO


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


OPTIMIZERS: dict[str, MakeOptimizer] = {"adamw": adamw, "plain": plain}


@pytest.mark.parametrize("name", some(["gpt2", "resnet", "unet", "tied"], keep=["resnet"]))
@pytest.mark.parametrize("optimizer", some(list(OPTIMIZERS), keep=["plain"]))
def test_equal_to_eager(name: str, optimizer: str) -> None:
    prepared = prepare(ZOO[name], OPTIMIZERS[optimizer])
    whole = prepared.solve().summary
    variants = [Variant("plain", prepared.trace, prepared.nodes, prepared.blocks)]
    least, most = whole.smallest_feasible_bytes, whole.device_peak_bytes
    found = 0
    for share in (0.0, 0.3, 0.6, 1.0):
        request = PlanRequest(least + int(share * (most - least)), slots=100, cut_seconds=10.0)
        solved = solve_variants(variants, prepared.options, request)
        if solved.summary.method == METHOD:
            found += 1
            assert_equal_training(ZOO[name], prepared, solved, optimizer=OPTIMIZERS[optimizer])
    assert found
