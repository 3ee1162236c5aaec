"""Tests in processes of their own: what becomes of them is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu.apart import INSIDE
from tests.gpu.conftest import pytest_pyfunc_call

only_inside = pytest.mark.skipif(INSIDE not in os.environ, reason="runs in a process of its own alone")


@only_inside
def test_that_passes() -> None:
    assert os.environ["MORE"] == "given"


@only_inside
def test_that_dies() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def on_a_gpu(name: str) -> Any:
    """A test as pytest would call it there."""
    marker = SimpleNamespace(kwargs={"MORE": "given"})
    return SimpleNamespace(
        path=Path(__file__),
        nodeid=f"somewhere/test_apart.py::{name}",
        funcargs={"device": "cuda"},
        get_closest_marker=lambda of: marker if of == "apart" else None,
    )


def test_one_that_passes_has_passed() -> None:
    assert pytest_pyfunc_call(on_a_gpu("test_that_passes")) is True


def test_one_that_dies_is_told() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)status -11.*in test_that_dies"):
        pytest_pyfunc_call(on_a_gpu("test_that_dies"))
