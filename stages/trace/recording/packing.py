"""Takes decisions on values that are the same in every step like this one, as eager takes them.

Models of `transformers` look at a mask to see whether it masks anything, and at positions to see whether several
sequences are packed into one row. If not, eager calls attention with `is_causal` and no mask. Tracers cannot read
tensors, so the library assumes padding and packing and builds a mask; this is another kernel, with other numbers, and
the mask needs memory. But positions that the model made itself do not depend on the batch, and the properties of masks
and positions in the batch's signature are true of every step: in these cases the decision is eager's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stowage.stages.trace.recording.record import Recorder

_MODULE = "transformers.masking_utils"
_FUNCTIONS = ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
"""Functions that look at the values of their first argument."""


@contextmanager
def packing_as_in_eager(recorder: Recorder) -> Iterator[None]:
    """Let the library look at masks and positions with known values inside the block, as eager does."""
    module = sys.modules.get(_MODULE)
    before = {name: getattr(module, name) for name in _FUNCTIONS if hasattr(module, name)}
    for name, function in before.items():
        setattr(module, name, _looking(function, recorder))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _looking(looks: Any, recorder: Recorder) -> Any:
    @functools.wraps(looks)
    def look(values: torch.Tensor | None, *arguments: Any, **more: Any) -> Any:
        known = recorder.assumed_value(values) if isinstance(values, torch.Tensor) else None
        if known is not None:
            with _disable_current_modes():
                answer = looks(known, *arguments, **more)
            if answer is None:  # nothing is packed
                return None
            if not isinstance(answer, torch.Tensor) or answer.dim() == 0:  # whether the mask can be left out
                return bool(answer)
        return looks(values, *arguments, **more)

    return look
