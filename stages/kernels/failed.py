"""Recognizes a GPU that has failed.

Nothing runs in its process any more, and trying other calls there would only hide the cause.
"""

from __future__ import annotations

import torch

from stowage.stages.ir.errors import StowageError

_KIND: tuple[type[Exception], ...] = tuple(
    kind for name in ("AcceleratorError",) if isinstance(kind := getattr(torch, name, None), type)
)
_MARKS = ("CUDA error", "device-side assert")


class DeviceFailedError(StowageError):
    """Raised when the GPU has failed in this process."""


def has_failed(error: BaseException) -> bool:
    """Say whether an error means that the GPU has failed; running out of memory does not."""
    if isinstance(error, (torch.OutOfMemoryError, DeviceFailedError)):
        return isinstance(error, DeviceFailedError)
    text = str(error)
    return isinstance(error, _KIND) or (isinstance(error, RuntimeError) and any(mark in text for mark in _MARKS))


def raise_if_failed(error: BaseException, what: str) -> None:
    """Raise an error that says what to do, if `error` means that the GPU has failed.

    Args:
        error: the error that a call raised.
        what: what was called, for the message.

    Raises:
        DeviceFailedError: the device has failed.
    """
    if has_failed(error):
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceFailedError(
            f"The GPU has failed while {what} ran on made-up numbers ({first}): nothing more runs in this process. "
            "Start again with CUDA_LAUNCH_BLOCKING=1 to see the call, or plan with estimates (costs: roofline)."
        ) from error
