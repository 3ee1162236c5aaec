"""What went wrong while a step was traced, in one sentence that names the module and the line."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from stowage.stages.ir.errors import TraceError
from stowage.stages.trace.marking import Marker

_SKIP = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


def _line(frames: Any) -> str:
    """`file:line` of the innermost frame that is neither PyTorch's nor ours."""
    inner = [f for f in frames if not f.filename.startswith(_SKIP)]
    return f"{inner[-1].filename}:{inner[-1].lineno}" if inner else "unknown line"


def _where(marker: Marker, frames: Any) -> str:
    return f"Module '{(marker.stack or [''])[-1]}' ({_line(frames)})"


def reads_a_value(func: Any, marker: Marker) -> TraceError:
    """The step depends on a number that is read off a tensor, here."""
    frames = traceback.extract_stack(sys._getframe(1))
    return TraceError(
        f"{_where(marker, frames)} reads a tensor's value during the step ({func}), so its control flow depends on "
        "data and cannot be planned: compute the value before the step and pass it in the batch."
    )


def explain(error: BaseException, marker: Marker) -> TraceError:
    """An error that came out of the user's code or of PyTorch."""
    where = _where(marker, traceback.extract_tb(error.__traceback__))
    if isinstance(error, DataDependentOutputException):
        return TraceError(
            f"{where} reads a tensor's value during the step ({error.func}), so its control flow depends on data and "
            "cannot be planned: compute the value before the step and pass it in the batch."
        )
    if isinstance(error, DynamicOutputShapeException):
        return TraceError(
            f"{where} makes a tensor whose shape depends on data ({error.func}), which cannot be planned: use an "
            "operation with a fixed shape, such as torch.where."
        )
    first_line = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    unsupported = isinstance(error, (UnsupportedOperatorException, NotImplementedError))
    if unsupported or "no fake impl registered" in first_line:
        return TraceError(
            f"{where} calls an operator without a fake kernel ({first_line}): register one with "
            "torch.library.register_fake."
        )
    return TraceError(f"{where} cannot be traced: {type(error).__name__}: {first_line}.")
