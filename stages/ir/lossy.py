"""Says what may be lossy: leave by kind of codes, a limit on what it does to gradients, and what was measured of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from stowage.stages.ir.errors import ParameterError

KINDS: dict[str, str] = {
    "bf16": "bfloat16",
    "fp8_e4m3": "8-bit floating point with 3 bits of mantissa",
    "fp8_e5m2": "8-bit floating point with 2 bits of mantissa",
    "fixed8": "8-bit fixed point with steps of 1/16, without a scale, as SlimFit has it",
    "fixed8_unit": "8-bit fixed point without sign, of 0 to 255/256 in steps of 1/256, for what softmax or a sigmoid "
    "returns, as SlimFit's code has it",
    "fixed4": "4-bit fixed point with steps of 1/2, without a scale, as SlimFit has it; two values a byte",
    "int8": "8 bits with a scale for each row",
    "int8_tensor": "8 bits with one scale for a tensor",
    "int8_group": "8 bits with a scale for each 64 elements",
    "int4": "4 bits with a scale for each row; two values a byte",
    "int4_tensor": "4 bits with one scale for a tensor; two values a byte",
    "int4_group": "4 bits with a scale for each 64 elements; two values a byte",
    "relu1bit": "1 bit for what only ReLU's backward reads: exact",
    "gelu2bit": "2 bits for what only GELU's backward reads",
    "silu2bit": "2 bits for what only SiLU's backward reads",
    "top10": "the tenth, farthest from the mean and with indices, of what only a layer normalisation reads while it is "
    "frozen, as SlimFit has it",
}
"""Kinds of codes that values may be kept in for backward."""

MAX_GRADIENT_ERROR = 0.01
"""Default of `Lossy.max_gradient_error`."""

NO_LIMIT = 1e30
"""A limit for `Lossy.max_gradient_error` that nothing exceeds; larger ones, whose squares are no numbers, mean it."""

MEASURED_BATCHES = 4
"""Most batches on which errors are measured."""

LOOKED_AT = 64
"""Most batches among which those are looked for."""


ERRORS = "errors.parquet"
"""Name of the table of what was measured, beside those of the trace; it is there where there is leave."""


@dataclass(frozen=True)
class Lossy:
    """Leave to keep values for backward in fewer bits, which changes gradients and never the loss of the same weights.

    Attributes:
        kinds: kinds of codes that may be used, see `KINDS`; `all` for every one.
        max_gradient_error: most that the gradient of a step may change by, with the weights of when it is planned: the
            norm of the difference over the norm of the gradient, of all parameters together. What each kind does to
            each class of tensors is measured before planning; errors of several classes are taken to be independent,
            so that their squares add up. A step that freezes has the gradients of what trains alone, and the limit
            holds whatever does. With 0 only kinds that change nothing are used.
        batches: what it is measured on, the first four of the form of the one that `fit` gets, among the first
            `LOOKED_AT`: a list or a loader. With none it is measured on that one.
    """

    kinds: tuple[str, ...] = tuple(KINDS)
    max_gradient_error: float = MAX_GRADIENT_ERROR
    batches: Iterable[Any] = field(default=(), repr=False, compare=False)

    def __init__(
        self,
        kinds: Iterable[str] | str = "all",
        max_gradient_error: float = MAX_GRADIENT_ERROR,
        batches: Iterable[Any] = (),
    ) -> None:
        """Check the attributes.

        Raises:
            ParameterError: a kind is none of `KINDS`, the limit is no number of at least 0, or batches are no list or
                loader.
        """
        wanted = (kinds,) if isinstance(kinds, str) or not isinstance(kinds, Iterable) else tuple(kinds)
        for kind in wanted:
            if not isinstance(kind, str) or (kind != "all" and kind not in KINDS):
                raise ParameterError(
                    f"lossy has the kind {ascii(kind)[:60]}: take some of {', '.join(KINDS)}, or 'all'."
                )
        limit = max_gradient_error
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit < math.inf:
            raise ParameterError(
                f"max_gradient_error of lossy is {limit!r}: give a number of at least 0, such as 0.01."
            )
        if isinstance(batches, (str, Mapping)) or hasattr(batches, "shape") or not isinstance(batches, Iterable):
            raise ParameterError(
                f"batches of lossy is of {type(batches).__name__}: give a list of batches, or a loader of them."
            )
        object.__setattr__(self, "kinds", tuple(kind for kind in KINDS if kind in wanted or "all" in wanted))
        object.__setattr__(self, "max_gradient_error", float(min(limit, NO_LIMIT)))
        once = isinstance(batches, Iterator)  # each program of a model measures on them
        object.__setattr__(self, "batches", tuple(islice(batches, LOOKED_AT)) if once else batches)


@dataclass(frozen=True)
class GradientError:
    """What one kind of codes does to the gradient when one class of tensors is kept in it; a row of a table.

    Attributes:
        kind: the kind of codes.
        tensors: the class of tensors.
        squared_error: the squared norm of the change of the gradient over the squared norm of the gradient; of a step
            that freezes the most that it is whatever trains.
        variance: how much the gradient varies from batch to batch without the codes, over the same norm: the squared
            distance of one batch's to the mean; 0 where one batch was measured.
        coded_variance: the same with the codes.
        parameters: those whose gradients were compared.
        changes: the squared norm of the change of each one's gradient, over that of the whole gradient.
        shares: the squared norm of each one's gradient, over that of the whole gradient.
    """

    kind: str
    tensors: str
    squared_error: float
    variance: float = 0.0
    coded_variance: float = 0.0
    parameters: tuple[str, ...] = ()
    changes: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
