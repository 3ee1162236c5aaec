"""Two ranks whose plan keeps values in codes train like DistributedDataParallel with the same codes in its hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from stowage.flows import Lossy, fit
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.rewrite.lossy import saved as saved_module
from tests.sharding import planned_beside_ddp
from tests.sharding.codes_beside_ddp import first_lossy, in_codes
from tests.sharding.planned_beside_ddp import Compared, compare, train_ddp
from tests.sharding.processes import on_ranks


def _compared(name: str, stores: Path) -> tuple[Compared, float]:
    steps: list[TrainingStep] = []

    def kept(*given: Any, **named: Any) -> TrainingStep:
        steps.append(fit(*given, **named))
        return steps[-1]

    with (
        patch.object(saved_module, "SMALLEST", 64),
        patch("stowage.flows.planning.step.solve_variants", first_lossy),
        patch.object(planned_beside_ddp, "fit", kept),
    ):
        lossy = {"lossy": Lossy(["bf16", "int8_tensor"], 0.1)}
        found = compare(name, "adamw", "60%", stores, reference=in_codes(name, steps, train_ddp), more=lossy)
    assert not steps[0].plan.exact
    return found, steps[0].plan.gradient_error


@pytest.mark.long
def test_two_ranks_with_codes(fit_stores: Path) -> None:
    for rank, (one, error) in enumerate(on_ranks(2, _compared, "gpt2", fit_stores)):
        assert not one.differences, f"rank {rank}: {one.differences}"
        assert one.peak_bytes <= max(1.02 * one.predicted_bytes, one.predicted_bytes + (1 << 14)), rank
        assert 0 < error <= 0.1
