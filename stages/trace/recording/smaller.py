"""Makes smaller forms with the same pattern of equal sizes, order of strides, gaps and broadcasts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stowage.stages.kernels import Form, Output, Outputs

KEPT = 8
"""The largest size that is not made smaller."""


def smaller(forms: Sequence[Form]) -> tuple[list[Form], dict[int, int]]:
    """Return the forms with smaller sizes, and a map from each size to the smaller one.

    Sizes keep their remainder modulo 8, and remain two to four times another: many kernels need an even number or a
    multiple of 4, halve a dimension, or make three of one.
    """
    number: dict[int, int] = {}
    for n in sorted({n for form in forms for n in form.shape if n > 1}):
        last = max(number.values(), default=0)
        times = [m * (n // other) for other, m in number.items() if n % other == 0 and n // other <= 4]
        found = next((m for m in times if m > last), None)
        if n <= KEPT:
            found = n
        elif found is None:
            found = KEPT * (last // KEPT + 1) + n % KEPT
        number[n] = min(n, found)
    return [_smaller(form, number) for form in forms], number


def _smaller(form: Form, number: Mapping[int, int]) -> Form:
    shape = tuple(number.get(n, n) for n in form.shape)
    stride = list(form.stride)
    dense, few = 1, 1
    for d in sorted(range(len(shape)), key=lambda d: (form.stride[d], form.shape[d], d)):
        if form.stride[d] == 0:
            continue
        gap = 1 if form.stride[d] <= dense else math.ceil(form.stride[d] / dense)
        stride[d] = few * min(gap, 4) if form.stride[d] >= dense else form.stride[d]
        dense, few = form.stride[d] * form.shape[d], stride[d] * shape[d]
    return Form(form.dtype, shape, tuple(stride), form.offset % KEPT)


def larger(real: Outputs, fake: Outputs, small: Sequence[Form], whole: Sequence[Form]) -> Outputs | None:
    """Return what a call on `whole` returns; None if the pattern does not tell.

    Args:
        real: what the real kernel returned on the smaller forms.
        fake: what the fake kernel returns on `whole`.
        small: the smaller forms of the arguments.
        whole: the forms of the arguments.
    """
    if len(real) != len(fake):
        return None
    found: list[Output | None] = []
    for one, other in zip(real, fake):
        if one is None or other is None:
            found.append(other)
            continue
        made = _larger(one, other, small, whole)
        if made is None:
            return None
        found.append(made)
    return tuple(found)


def _larger(real: Output, fake: Output, small: Sequence[Form], whole: Sequence[Form]) -> Output | None:
    if len(real.form.shape) != len(fake.form.shape) or real.output >= 0:
        return None
    if math.prod(real.form.shape) and not math.prod(fake.form.shape):
        return None  # the fake kernel does not know its size
    if real.argument >= 0:
        same = real.form == small[real.argument] and fake.form.shape == whole[real.argument].shape
        return Output(whole[real.argument], 0, real.argument) if same else None
    order = sorted(range(len(real.form.shape)), key=lambda d: (real.form.stride[d], real.form.shape[d], d))
    if _dense(real.form.shape, order) != real.form.stride or real.form.offset:
        return None
    size = real.form.dtype.itemsize
    form = Form(real.form.dtype, fake.form.shape, _dense(fake.form.shape, order))
    elements = [
        (math.prod(real.form.shape), math.prod(form.shape)),
        *((math.prod(few.shape), math.prod(many.shape)) for few, many in zip(small, whole)),
        (_together(small), _together(whole)),
    ]
    return next((Output(form, many * size) for few, many in elements if few * size == real.nbytes), None)


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return strides without gaps that ascend in this order of the dimensions."""
    stride = [0] * len(shape)
    reached = 1
    for d in order:
        stride[d] = reached
        reached *= shape[d]
    return tuple(stride)


def _together(forms: Sequence[Form]) -> int:
    """Return the number of elements after broadcasting the forms, 0 if they cannot be broadcast."""
    shape: list[int] = []
    for form in forms:
        other = [1] * (len(shape) - len(form.shape)) + list(form.shape)
        shape = [1] * (len(other) - len(shape)) + shape
        if any(a != b and 1 not in (a, b) for a, b in zip(shape, other)):
            return 0
        shape = [max(a, b) for a, b in zip(shape, other)]
    return math.prod(shape)
