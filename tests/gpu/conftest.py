"""Where these tests run: on the CPU always, on a GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before CUDA starts: matrix products then repeat bit for bit

import pytest
import torch

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kind of device, with kernels that repeat bit for bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield str(request.param)
    torch.use_deterministic_algorithms(False)
