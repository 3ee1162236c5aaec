"""Explains what went wrong while a step was traced, in one sentence that names the module and the line."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from stowage.stages.ir.errors import TraceError
from stowage.stages.trace.recording.marking import Marker

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = tuple({os.path.dirname(os.path.dirname(f)) + os.sep for f in (__file__, os.path.realpath(__file__))})
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_FIXED = {
    "_pack_padded_sequence": "run the layer on the padded sequences, and mask what is behind their ends",
    "_ctc_loss": "its kernel sizes its tables by the longest target; sum up the paths with torch.logsumexp instead",
}
"""Operator -> what the user can do instead."""
_CODE_THAT_READS = {
    f"distributions{os.sep}": "make the distribution with validate_args=False",
    os.path.join("nn", "modules", "batchnorm"): "give it a momentum, such as momentum=0.1, instead of None, with which "
    "it reads its count of batches",
    f"ao{os.sep}": "train without observers of ranges, and quantize with torch.fake_quantize_per_tensor_affine, whose "
    "scale and zero point are numbers that you choose",
}
"""Part of PyTorch that reads values -> what the user can do instead."""
_LOOK_ELSEWHERE = "so its control flow depends on data and cannot be planned"


def _is_users(file: str) -> bool:
    return not file.startswith((_STANDARD, "<")) and not any(part in file for part in _INSTALLED)


def _line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return ` (file:line)` of the innermost frame that the user can edit; else of the innermost outside of PyTorch."""
    outside = [f for f in frames if not f.filename.startswith((_TORCH, *_OURS)) and not f.filename.startswith("<")]
    users = [f for f in outside if _is_users(f.filename)]
    chosen = (users or outside)[-1:]
    return f" ({chosen[0].filename}:{chosen[0].lineno})" if chosen else ""


def where(marker: Marker, frames: Iterable[traceback.FrameSummary]) -> str:
    """Name the culprit: `Module 'blocks.3' (model.py:31)`, `The model (…)` or `The loss (…)`."""
    line = _line(frames)
    if not marker.stack:
        return f"The {'loss' if marker.phase == 'forward' else 'backward pass'}{line}"
    return f"Module '{marker.stack[-1]}'{line}" if marker.stack[-1] else f"The model{line}"


def here(marker: Marker) -> str:
    """Name the module and line that run now."""
    frames = list(traceback.extract_stack(sys._getframe(1)))
    inside = [i for i, f in enumerate(frames) if f.name == "capture" and f.filename.startswith(_OURS)]
    return where(marker, frames[inside[-1] + 1 :] if inside else frames)


def _reads(place: str, func: Any, frames: Iterable[traceback.FrameSummary]) -> TraceError:
    files = {f.filename.removeprefix(_TORCH) for f in frames if f.filename.startswith(_TORCH)}
    remedies = (remedy for part, remedy in _CODE_THAT_READS.items() if any(file.startswith(part) for file in files))
    remedy = next(remedies, "compute the value before the step and pass it in the batch")
    return TraceError(f"{place} reads a tensor's value during the step ({func}), {_LOOK_ELSEWHERE}: {remedy}.")


def reads_a_value(func: Any, marker: Marker) -> TraceError:
    """Return the error that the running code depends on a number that is read off a tensor."""
    return _reads(here(marker), func, traceback.extract_stack(sys._getframe(1)))


def explain(error: BaseException, marker: Marker) -> TraceError:
    """Return an error that explains one raised by the user's code or by PyTorch."""
    frames = traceback.extract_tb(error.__traceback__)
    place = where(marker, frames)
    if isinstance(error, DataDependentOutputException):
        return _reads(place, error.func, frames)
    if isinstance(error, DynamicOutputShapeException):
        remedy = _FIXED.get(str(error.func).split(".")[1], "use an operation with a fixed shape, such as torch.where")
        return TraceError(
            f"{place} makes a tensor whose shape depends on data ({error.func}), which cannot be planned: {remedy}."
        )
    first_line = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    if any(f.name == "compile_wrapper" for f in frames):
        return TraceError(
            f"{place} calls a function under torch.compile ({type(error).__name__}: {first_line}): call the function "
            "itself, which the plan takes the place of."
        )
    unsupported = isinstance(error, (UnsupportedOperatorException, NotImplementedError))
    if unsupported or "no fake impl registered" in first_line:
        return TraceError(
            f"{place} calls an operator without a fake kernel ({first_line}): register one with "
            "torch.library.register_fake."
        )
    return TraceError(f"{place} cannot be traced: {type(error).__name__}: {first_line}.")


def cause_of(error: BaseException) -> BaseException | None:
    """Return the error to show above a refusal in a traceback: none, unless `STOWAGE_TRACEBACK` is `long`."""
    return error if os.environ.get("STOWAGE_TRACEBACK") == "long" else None
