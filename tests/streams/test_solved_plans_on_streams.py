"""Plans of the product's own solvers on the model of a GPU's streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from stowage.stages.codegen import emit_step
from stowage.stages.solve.summary import Solved
from tests.offload import test_clipped_cpu_updates as clipped
from tests.offload import test_three_tiers as tiers
from tests.offload.test_offloaded_training import OPTIMIZERS
from tests.solve.prepared import Prepared
from tests.streams.checking import Job, Piece, check, in_random_order
from tests.streams.jobs import disk_for
from tests.zoo import ZOO


def job_of(name: str, optimizer: str, prepared: Prepared, solved: Solved, max_grad_norm: float | None = None) -> Job:
    """A solved plan as a job."""
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, solved.slots)
    piece = Piece(prepared.trace, source, tuple(solved.slots))
    return Job(name, ZOO[name], OPTIMIZERS[optimizer], (piece,), max_grad_norm)


@pytest.mark.parametrize("seed", range(2))
def test_three_tiers_and_updates_by_the_cpu(seed: int, tmp_path: Path) -> None:
    _, solved = tiers.three_tiers("llama", "momentum", tiers.CPU)
    job = job_of("llama", "momentum", tiers.prepared_for("llama", "momentum"), solved)
    assert disk_for(job, tmp_path) is not None
    assert check(job, in_random_order(seed), tmp_path).all() == []


@pytest.mark.parametrize("seed", range(2))
def test_clipped_updates_by_the_cpu(seed: int) -> None:
    solved = clipped.planned("llama", "momentum")
    prepared = clipped.prepared_for("llama", "momentum", clipped.ACTIVE)
    assert check(job_of("llama", "momentum", prepared, solved, clipped.ACTIVE), in_random_order(seed)).all() == []
