"""Chooses the batches on which is measured what codes do to the gradient: those of the form of the step's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stowage.stages.ir.lossy import Lossy
from stowage.stages.structure import tensors_of

ONE_BATCH = (
    "What codes do to the gradient is measured on one batch, and a few say more: give some like it, such as "
    "Lossy(batches=loader)."
)


def measured_batches(batch: Any, lossy: Lossy) -> Sequence[Any]:
    """Return those of the batches that were given for it whose tensors have the form of a batch's; else this one."""
    wanted = _form(batch)
    return [each for each in lossy.batches if _form(each) == wanted] or [batch]


def _form(batch: Any) -> list[tuple[Any, ...]]:
    keys = tuple(batch) if isinstance(batch, dict) else ()
    return [keys, *((tuple(t.shape), t.dtype) for t in tensors_of(batch))]
