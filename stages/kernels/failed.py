"""A GPU that has failed: nothing runs in its process any more, so that trying something else there only hides why."""

from __future__ import annotations

import torch

from stowage.stages.ir.errors import StowageError

_KIND: tuple[type[Exception], ...] = tuple(
    kind for name in ("AcceleratorError",) if isinstance(kind := getattr(torch, name, None), type)
)
_MARKS = ("CUDA error", "device-side assert")


class DeviceFailedError(StowageError):
    """The GPU has failed in this process."""


def has_failed(error: BaseException) -> bool:
    """Whether an error tells that; memory that runs out does not."""
    if isinstance(error, (torch.OutOfMemoryError, DeviceFailedError)):
        return isinstance(error, DeviceFailedError)
    text = str(error)
    return isinstance(error, _KIND) or (isinstance(error, RuntimeError) and any(mark in text for mark in _MARKS))


def raise_if_failed(error: BaseException, what: str) -> None:
    """
    Args:
        error: that came out of a call.
        what: was called.

    Raises:
        DeviceFailedError: the device has failed.
    """
    if has_failed(error):
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceFailedError(
            f"The GPU has failed while {what} ran on made-up numbers ({first}): nothing more runs in this process. "
            "Start again with CUDA_LAUNCH_BLOCKING=1 to see the call, or plan with estimates (costs: roofline)."
        ) from error
