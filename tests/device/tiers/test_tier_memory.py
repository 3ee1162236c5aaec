"""The kernel as judge: what a process is charged for when it moves many times its memory to disk and back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stowage.flows.benchmarks.limits.cgroup import run_limited, why_no_limits
from stowage.stages.device.tiers import DiskTier

MIB = 1 << 20
MOVES = """
import sys, torch
from stowage.stages.device.tiers import DiskTier

torch.set_num_threads(1)
tensor = torch.ones(8 << 20)
tier = DiskTier(sys.argv[1])
for slot in map(str, range(int(sys.argv[2]))):
    tier.reserve({slot: tensor.nbytes})
    tier.offload(slot, tensor).wait()
    tier.reload(slot, tensor.zero_()).wait()
    assert (tensor == 1).all()
"""


@pytest.mark.skipif(bool(why_no_limits()), reason=why_no_limits() or "limits can be set")
def test_what_is_moved_is_not_charged(tmp_path: Path) -> None:
    """1 GiB each way is charged like 32 MiB, and runs under a limit that would not hold it."""
    tier = DiskTier(tmp_path)
    if not tier.direct:
        pytest.skip(tier.note)
    runs = [run_limited([sys.executable, "-c", MOVES, str(tmp_path), str(n)], 2048 * MIB) for n in (1, 32)]
    assert all(run.survived for run in runs), [run.output for run in runs]
    if not runs[0].peak_bytes:
        pytest.skip("this kernel does not say how much was charged")
    assert runs[1].peak_bytes - runs[0].peak_bytes <= 64 * MIB  # program pages in the page cache come and go
    tight = run_limited([sys.executable, "-c", MOVES, str(tmp_path), "32"], runs[0].peak_bytes + 64 * MIB)
    assert tight.survived, tight.output
    tier.close()
