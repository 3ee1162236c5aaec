"""Decisions on values that are the same in every step, which eager takes and a trace must take alike.

Models of `transformers` look at positions to see whether several sequences are packed into one row. Where none are,
eager calls attention with `is_causal` and no mask. Tracers cannot read tensors: the library assumes packing
and builds a mask: another kernel, with other numbers on a GPU, and the mask's memory. Positions that the model made
itself do not depend on the batch, and their values are known while tracing: then the decision is eager's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stowage.stages.trace.record import Recorder

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def packing_as_in_eager(recorder: Recorder) -> Iterator[None]:
    """While a model is traced: positions with known values are looked at, as eager does."""
    module = sys.modules.get(_MODULE)
    looks: Any = getattr(module, _FUNCTION, None)
    if looks is None:
        yield
        return

    def look(position_ids: torch.Tensor) -> torch.Tensor | None:
        value = recorder.known_value(position_ids)
        if value is not None:
            with _disable_current_modes():
                if looks(value) is None:
                    return None
        packed: torch.Tensor | None = looks(position_ids)
        return packed

    setattr(module, _FUNCTION, look)
    try:
        yield
    finally:
        setattr(module, _FUNCTION, looks)
