"""Chooses the batches on which is measured what codes do to the gradient: those of the form of the step's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from stowage.stages.ir.lossy import LOOKED_AT, MEASURED_BATCHES, Lossy
from stowage.stages.structure import tensors_of

ONE_BATCH = (
    "What codes do to the gradient is measured on one batch, and a few say more: give some like it, such as "
    "Lossy(batches=loader)."
)


NONE_LIKE_IT = (
    "None of the batches that lossy has is of the form of the step's own batch, so what codes do to the gradient is "
    "measured on that one: give batches of its shapes and types."
)


def measured_batches(batch: Any, lossy: Lossy) -> tuple[Sequence[Any], str]:
    """Return the batches on which is measured what codes do in steps on a batch, and a notice, "" for none.

    They are the first that were given for it whose tensors have the form of the batch's; without any it is this one.
    """
    wanted, given = _form(batch), False
    found: list[Any] = []
    for each in islice(lossy.batches, LOOKED_AT):
        given = True
        if _form(each) == wanted:
            found.append(each)
        if len(found) == MEASURED_BATCHES:
            break
    if found:
        return found, ONE_BATCH if len(found) == 1 else ""
    return [batch], NONE_LIKE_IT if given else ONE_BATCH


def _form(batch: Any) -> list[tuple[Any, ...]]:
    keys = tuple(batch) if isinstance(batch, dict) else ()
    return [keys, *((tuple(t.shape), t.dtype) for t in tensors_of(batch))]
