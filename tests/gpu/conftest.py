"""Where these tests run: on the CPU always, on a GPU where there is one.

None of them has run on a GPU yet: what they say of one was read in PyTorch's documentation and source, and each runs
on the CPU as far as that has what it is about.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before CUDA starts: matrix products then repeat bit for bit

import pytest
import torch

from tests.gpu.apart import INSIDE, run_apart

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SECOND = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def pytest_configure(config: pytest.Config) -> None:
    """Wherever the root is."""
    config.addinivalue_line("markers", "apart(**environment): on a GPU in a process of its own")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kind of device, with kernels that repeat bit for bit."""
    yield from _strict(str(request.param))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA), pytest.param("cuda:1", marks=SECOND)])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device, the second one of its kind too."""
    yield from _strict(str(request.param))


def _strict(name: str) -> Iterator[str]:
    """An operator without a kernel that repeats raises: with a warning instead, fused attention would take a backward
    that adds up in any order."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    yield name
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """On a GPU a test marked `apart` runs in a process of its own, with the marker's keywords in its environment."""
    marker = pyfuncitem.get_closest_marker("apart")
    where = str(pyfuncitem.funcargs.get("device", "cpu"))
    if marker is None or where == "cpu" or INSIDE in os.environ:
        return None
    found = run_apart(pyfuncitem.path, pyfuncitem.nodeid.partition("::")[2], dict(marker.kwargs))
    if found:
        pytest.fail(found, pytrace=False)
    return True
