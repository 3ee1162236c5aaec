"""What a scatter on a CPU takes for the number by which it divides gradients."""

from __future__ import annotations

import pytest
import torch

from stowage.stages.device import device_of
from stowage.stages.ir.collectives import SCATTER
from stowage.stages.profile.collectives import workspace_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
def test_dividing_a_gradient_takes_what_is_counted(dtype: torch.dtype) -> None:
    gradient = torch.ones(64, dtype=dtype)
    buffer = torch.empty_like(gradient)
    measured = device_of("cpu").measure(lambda: torch.mul(gradient, 1.0 / 2, out=buffer), [gradient, buffer])
    assert 0 < measured.peak_bytes <= workspace_bytes(SCATTER, [buffer.nbytes // 2], 2, "cpu") - buffer.nbytes
