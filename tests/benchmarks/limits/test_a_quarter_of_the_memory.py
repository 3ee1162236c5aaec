"""A plan's process lives in a quarter of what plain PyTorch needs; the kernel is the judge of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from stowage.flows.benchmarks.limits.cgroup import why_no_limits
from stowage.flows.benchmarks.limits.quarter import train_in_a_quarter


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_limits()), reason=why_no_limits())
def test_training_in_a_quarter_of_the_memory(tmp_path: Path) -> None:
    found = train_in_a_quarter(tmp_path, root=Path(__file__).parents[3], say=print)
    assert found.eager_killed_bytes >= 4 << 30
    assert found.limit_bytes == found.eager_limit_bytes // 4
    assert found.method in {"offmate", "belady"}, "which is faster hangs on the costs measured here"
    assert found.device_peak_bytes <= found.device_budget_bytes
    assert 0 < found.peak_bytes <= found.limit_bytes
    assert len(found.losses) == 3
    assert found.losses == found.eager_losses
