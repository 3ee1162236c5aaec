"""Rates of a tier: every byte is moved, in both directions, and the numbers are of the right kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stowage.stages.device.tiers import DiskTier
from stowage.stages.device.tiers.__main__ import main
from stowage.stages.device.tiers.rates import measure_tier
from tests.device.tiers.moving import random_bytes


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_moved(tmp_path: Path, beside: bool) -> None:
    tier = DiskTier(tmp_path)
    tier.record = True
    tensors = [random_bytes(100_000, index) for index in range(4)]
    matrix, calls = torch.randn(64, 64), [0]

    def compute() -> None:
        calls[0] += 1
        matrix.mm(matrix)

    rates = measure_tier(tier, tensors, rounds=2, compute=compute if beside else None)
    assert [rate.what for rate in rates] == ["write", "read", "both"]
    assert all(rate.bytes_per_s > 0 for rate in rates)
    assert beside or all(rate.compute_slowdown == 1 for rate in rates)
    assert (calls[0] > 0) == beside
    moved = [(span.stream, span.name) for span in tier.spans]
    assert moved.count(("offload", "rate0")) == 1 + 2 + 2, "first use, alone, and with reloads beside it"
    assert moved.count(("reload", "rate3")) == 2 + 2
    assert all(torch.equal(tensor, random_bytes(100_000, index)) for index, tensor in enumerate(tensors))
    tier.close()


def test_a_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 1
    assert "offload folder" in capsys.readouterr().err
