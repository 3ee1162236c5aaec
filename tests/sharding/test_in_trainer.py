"""The Hugging Face Trainer takes a sharded model as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharding.ranks import run_on_ranks

pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.mark.long
def test_the_trainer_gives_the_numbers_of_ddp(fit_stores: Path, tmp_path: Path) -> None:
    results = run_on_ranks("tests.sharding.in_trainer", str(fit_stores), str(tmp_path))
    assert [r["accumulate"] for r in results] == [1, 2, 1, 2]
    for result in results:
        ours, theirs = result["sharded"], result["ddp"]
        assert theirs["wrapped"] == "DistributedDataParallel"
        assert ours["wrapped"] == "FSDPGPT2LMHeadModel"
        assert ours["losses"] == theirs["losses"]
        assert len(ours["losses"]) == 4
        assert ours["sums"] == theirs["sums"]
        assert ours["saved"]
