"""What torch says to its own developers does not reach the terminal while planning; what the user's code says does."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.device.events import measure_allocations
from stowage.stages.ir.quiet import quiet_torch


def warn_inside(module: str) -> None:
    warnings.warn_explicit("said inside", UserWarning, f"{module}.py", 1, module=module)


def speak(logger: logging.Logger) -> None:
    """Like torch, like a library beside it, like the user."""
    logger.error("failed while attempting to run meta")
    logging.getLogger("torch.a_logger_that_comes_later").error("another")
    warn_inside("torch.nn.functional")
    warn_inside("torch")
    warn_inside("torchvision.ops")
    warnings.warn("the user's own", UserWarning, stacklevel=1)


def test_only_torch_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    top, inner = logging.getLogger("torch"), logging.getLogger("torch._subclasses.fake_tensor")
    handlers = [top.handlers[:], inner.handlers[:]]
    top.addHandler(handler)
    filters = warnings.filters[:]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with quiet_torch():
                speak(inner)
        assert capsys.readouterr().err == ""
        assert [str(w.message) for w in caught] == ["said inside", "the user's own"]
        top.error("as before")
        assert "as before" in capsys.readouterr().err
    finally:
        top.removeHandler(handler)
    assert [top.handlers, inner.handlers] == handlers
    assert warnings.filters == filters


def test_logs_that_were_asked_for_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+dynamic")
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("torch")
    logger.addHandler(handler)
    try:
        with quiet_torch():
            logger.error("wanted")
    finally:
        logger.removeHandler(handler)
    assert "wanted" in capsys.readouterr().err


def test_an_error_restores_everything() -> None:
    logger = logging.getLogger("torch")
    before = logger.handlers, logger.propagate
    with pytest.raises(ValueError, match="user's"), quiet_torch():
        raise ValueError("user's")
    assert (logger.handlers, logger.propagate) == before


def test_measuring_says_nothing_past_python(capfd: pytest.CaptureFixture[str]) -> None:
    """The profiler's C++ part tells about memory that existed before, once in a thousand releases."""
    for _ in range(2):
        old = [torch.ones(10) for _ in range(1100)]
        measure_allocations(old.clear)
    assert capfd.readouterr().err == ""


def test_a_first_plan_leaves_the_terminal_clean(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.LSTM(8, 4))
    batch = {"input": torch.ones(2, 4)}
    fit(
        model,
        batch,
        torch.optim.AdamW(model.parameters()),
        loss=lambda outputs, _: outputs[0].sum(),
        quick=True,
        device_budget="1GiB",
        cache_dir=tmp_path,
    )(batch)
    said = capfd.readouterr().err
    assert "torch" not in said
    assert "[W" not in said
