"""Keeps the tenth of what a frozen layer normalisation reads that is farthest from the mean of its row, with indices.

SlimFit (section 5): backward of a layer normalisation whose weight and bias do not train reads x̂ in one sum alone, to
which small |x̂| add little, so that they may be taken for 0. Here x itself is kept where |x̂| is among the largest of the
whole tensor, and is the mean of its row elsewhere, so that backward's own kernel finds 0 there.

Where the weight is frozen in some steps and trains in others, x is kept besides for those in which it trains, and
copied over what was unpacked (`ir.whole_copies`). The gradient of the bias reads nothing of x.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from stowage.stages.ir.trace import TraceTables, Value
from stowage.stages.ir.whole_copies import UNLESS_FROZEN
from stowage.stages.rewrite.lossy.bits import is_contiguous
from stowage.stages.rewrite.lossy.emitter import Form, Lines, tensor
from stowage.stages.rewrite.lossy.saved import Saved

SHARE = 0.1
"""The share of elements that is kept."""

BITS = SHARE * (32 + 32)
"""Bits of an element: a value and an index for each that is kept; means are left out."""

_BACKWARD = "aten.native_layer_norm_backward.default"
_TINY = 1e-12


def _results(trace: TraceTables, saved: Saved) -> set[tuple[bool, ...]]:
    """Return which results layer normalisations compute that alone read a value; none where something else does."""
    row = trace.values[saved.base]
    found: set[tuple[bool, ...]] = set()
    if saved.again or not is_contiguous(row) or row.dtype != "float32" or not row.shape:
        return found
    for call in (trace.calls[reader] for reader in saved.readers):
        if call.target != _BACKWARD or trace.values[call.reads[1]].storage != saved.storage:
            return set()
        arguments = json.loads(call.arguments)["args"]
        if arguments[2] != [row.shape[-1]]:
            return set()
        found.add(tuple(arguments[-1]))
    return found


def kept_elements(row: Value) -> int:
    """Return how many elements of a value are kept."""
    return max(1, int(SHARE * math.prod(row.shape)))


class Largest:
    """The tenth of a value with the largest |x̂|."""

    @staticmethod
    def fits(trace: TraceTables, saved: Saved) -> bool:
        """Say whether layer normalisations over rows of a contiguous value alone read it, none of which trains."""
        return _results(trace, saved) == {(True, False, False)}

    @staticmethod
    def fits_while_frozen(trace: TraceTables, saved: Saved) -> bool:
        """Say whether layer normalisations over rows of a contiguous value alone read it, whose weights train."""
        found = _results(trace, saved)
        return bool(found) and all(flags[:2] == (True, True) for flags in found)

    @staticmethod
    def pack(lines: Lines, value: int) -> Sequence[int]:
        """Write what is kept: values, their places, and the means of the rows."""
        row = lines.form(value)
        form, count = Form.like(row), math.prod(row.shape)
        last, some = len(row.shape) - 1, kept_elements(row)
        one = Form.contiguous(row.dtype, (*row.shape[:-1], 1))
        mean = lines.make("aten.mean.dim", tensor(value), [last], True, form=one, name="mean")
        away = lines.make("aten.sub.Tensor", tensor(value), tensor(mean), form=form, name="away", inside=True)
        square = lines.make("aten.mul.Tensor", tensor(away), tensor(away), form=form, name="square", inside=True)
        scale = lines.make("aten.mean.dim", tensor(square), [last], True, form=one, name="variance", inside=True)
        scale = lines.write("aten.add_.Tensor", scale, _TINY, name="above_zero")
        scale = lines.write("aten.rsqrt_.default", scale, name="scale")
        away = lines.write("aten.mul_.Tensor", away, tensor(scale), name="normalised")
        away = lines.write("aten.abs_.default", away, name="sizes")
        flat = lines.view("aten.view.default", away, [count], name="flat_sizes", shape=(count,))
        values, places = Form.contiguous(row.dtype, (some,)), Form.contiguous("int64", (some,))
        _, where = lines.make_both(
            "aten.topk.default", tensor(flat), some, forms=(values, places), names=("largest", "where")
        )
        narrow = Form.contiguous("int32", (some,))
        to = {"dtype": "int32"}
        indices = lines.make("aten._to_copy.default", tensor(where), form=narrow, name="indices", dtype=to)
        whole = lines.view("aten.view.default", value, [count], name="flat", shape=(count,))
        codes = lines.make("aten.index_select.default", tensor(whole), 0, tensor(where), form=values, name="codes")
        return [codes, indices, mean]

    @staticmethod
    def unpack(lines: Lines, codes: Sequence[int], row: Value, *, kind: str = "") -> int:
        """Write what is kept into rows of their means."""
        kept, indices, mean = codes
        count, some = math.prod(row.shape), kept_elements(row)
        form, times = Form.contiguous(row.dtype, row.shape), [*([1] * (len(row.shape) - 1)), row.shape[-1]]
        again = lines.make("aten.repeat.default", tensor(mean), times, form=form, name="again", kind=kind)
        places = Form.contiguous("int64", (some,))
        to = {"dtype": "int64"}
        where = lines.make("aten._to_copy.default", tensor(indices), form=places, name="where", inside=True, dtype=to)
        flat = lines.view("aten.view.default", again, [count], name="flat", shape=(count,))
        flat = lines.write("aten.scatter_.src", flat, 0, tensor(where), tensor(kept), name="scattered")
        return lines.view("aten.view.default", flat, list(row.shape), name="unpacked", shape=row.shape)

    @staticmethod
    def unpack_unless_trained(lines: Lines, codes: Sequence[int], row: Value) -> int:
        """Write what is kept, and the whole value over it; the latter is left out in steps that freeze the weights."""
        found = Largest.unpack(lines, codes, row, kind=UNLESS_FROZEN)
        lines.fill("aten.copy_.default", found, tensor(row.value))
        return found
