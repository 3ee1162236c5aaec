"""Keeps of what an activation function read, or returned, only what its backward needs: one or two bits of an element.

- ReLU's backward asks whether the output is above 0: one bit, and the same gradient bit for bit.
- The derivatives of GELU and SiLU are replaced by functions of four steps (Novikov et al. 2022, Few-bit backward), with
  the least squared distance on [−10, 10], as in the authors' notebook; the table in their package is of [−100, 100].
  Both are symmetric about the point (0, 1/2), so the steps are told apart by the sign of x and by whether |x| is above
  a bound; backward runs on four points at which the derivative has the height of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stowage.stages.ir.trace import TraceTables, Value
from stowage.stages.rewrite.lossy.emitter import Form, Lines, tensor
from stowage.stages.rewrite.lossy.saved import Saved, contiguous_stride


def is_contiguous(row: Value) -> bool:
    """Say whether a value's elements are in memory in their order, one after another."""
    pairs = zip(row.shape, row.stride, contiguous_stride(row.shape))
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def in_bytes(lines: Lines, codes: int, bits: int) -> int:
    """Write codes of some bits, one a byte, into as few bytes as they need: equal parts of the value share bytes."""
    count = math.prod(lines.form(codes).shape)
    parts = 8 // bits
    part = Form.contiguous("uint8", (count // parts,))
    flat = lines.view("aten.view.default", codes, [count], name="flat", shape=(count,))
    ends = [count // parts * i for i in range(parts + 1)]
    slices = [
        lines.view("aten.slice.Tensor", flat, 0, low, high, name="part", shape=part.shape, offset=low)
        for low, high in pairwise(ends)
    ]
    found = slices[0]
    for i, each in enumerate(slices[1:], 1):
        name = "codes" if i == parts - 1 else "some"
        inside = i < parts - 1
        found = lines.make(
            "aten.add.Tensor", tensor(found), tensor(each), form=part, name=name, inside=inside, alpha=1 << bits * i
        )
    return found


def from_bytes(lines: Lines, packed: int, bits: int, row: Value) -> int:
    """Write the codes that `in_bytes` put into bytes, one a byte, in the shape of a value."""
    parts = 8 // bits
    part = Form.like(lines.form(packed))
    shift = "aten.bitwise_right_shift.Tensor_Scalar"
    found: list[int] = []
    for i in range(parts):
        own = packed if i == 0 else lines.make(shift, tensor(packed), bits * i, form=part, name="high", inside=True)
        if i < parts - 1:
            most = (1 << bits) - 1
            own = lines.make("aten.bitwise_and.Scalar", tensor(own), most, form=part, name="low", inside=True)
        found.append(own)
    whole = Form.contiguous("uint8", (math.prod(row.shape),))
    both = lines.make("aten.cat.default", [tensor(v) for v in found], form=whole, name="bytes", inside=True)
    return lines.view("aten.view.default", both, list(row.shape), name="shaped", shape=row.shape)


def _cast(lines: Lines, value: int, dtype: str, name: str, *, inside: bool = True) -> int:
    form = Form.like(lines.form(value), dtype)
    return lines.make(
        "aten._to_copy.default", tensor(value), form=form, name=name, inside=inside, dtype={"dtype": dtype}
    )


def _only(trace: TraceTables, saved: Saved, operator: str, position: int, parts: int) -> bool:
    """Say whether all that reads a contiguous value in backward is an operator, as the argument at a position."""
    row = trace.values[saved.base]
    calls = [trace.calls[reader] for reader in saved.readers]
    same = all(
        c.target == operator and trace.values[c.reads[position]].storage == saved.storage and len(c.reads) == 2
        for c in calls
    )
    return same and not saved.again and is_contiguous(row) and math.prod(row.shape) % parts == 0


class AboveZero:
    """One bit: whether an element is above 0, for ReLU."""

    @staticmethod
    def fits(trace: TraceTables, saved: Saved) -> bool:
        """Say whether backward asks only whether elements are above 0."""
        if not _only(trace, saved, "aten.threshold_backward.default", 1, 8):
            return False
        return all(trace.calls[c].arguments.endswith(',0],"kwargs":{}}') for c in saved.readers)

    @staticmethod
    def pack(lines: Lines, value: int) -> Sequence[int]:
        """Write the bits; no number counts as above 0, as in ReLU's backward."""
        form = Form.like(lines.form(value), "bool")
        blocked = lines.make("aten.le.Scalar", tensor(value), 0, form=form, name="blocked", inside=True)
        passed = lines.write("aten.logical_not_.default", blocked, name="passed")
        return [in_bytes(lines, _cast(lines, passed, "uint8", "one_a_byte"), 1)]

    @staticmethod
    def unpack(lines: Lines, codes: Sequence[int], row: Value) -> int:
        """Write 1/2 for elements above 0, and −1/2 for others."""
        again = _cast(lines, from_bytes(lines, codes[0], 1, row), row.dtype, "again", inside=False)
        return lines.write("aten.sub_.Tensor", again, 0.5, name="unpacked")


@dataclass(frozen=True)
class FourPoints:
    """Two bits: the sign of an element, and whether it is far from 0.

    Attributes:
        operator: the backward that reads it.
        bound: elements are far with more than this.
        near, far: distances from 0 of the points on which backward runs.
    """

    operator: str
    bound: float
    near: float
    far: float

    def fits(self, trace: TraceTables, saved: Saved) -> bool:
        """Say whether this backward alone reads the value."""
        if not _only(trace, saved, self.operator, 1, 4):
            return False
        return all('"approximate"' not in trace.calls[c].arguments for c in saved.readers)

    def pack(self, lines: Lines, value: int) -> Sequence[int]:
        """Write the codes, four a byte."""
        row = lines.form(value)
        above, sizes = Form.like(row, "bool"), Form.like(row)
        positive = lines.make("aten.gt.Scalar", tensor(value), 0, form=above, name="positive", inside=True)
        size = lines.make("aten.abs.default", tensor(value), form=sizes, name="sizes", inside=True)
        far = lines.make("aten.gt.Scalar", tensor(size), self.bound, form=above, name="far", inside=True)
        codes = _cast(lines, positive, "uint8", "signs")
        codes = lines.write("aten.add_.Tensor", codes, tensor(far), name="one_a_byte", alpha=2)
        return [in_bytes(lines, codes, 2)]

    def unpack(self, lines: Lines, codes: Sequence[int], row: Value) -> int:
        """Write the points."""
        bytes_ = from_bytes(lines, codes[0], 2, row)
        form = Form.like(lines.form(bytes_))
        shift = "aten.bitwise_right_shift.Tensor_Scalar"
        far = lines.make(shift, tensor(bytes_), 1, form=form, name="is_far", inside=True)
        sign = lines.make("aten.bitwise_and.Scalar", tensor(bytes_), 1, form=form, name="is_positive", inside=True)
        size = _cast(lines, far, row.dtype, "distance")
        size = lines.write("aten.mul_.Tensor", size, self.far - self.near, name="more")
        size = lines.write("aten.add_.Tensor", size, self.near, name="distances")
        again = _cast(lines, sign, row.dtype, "again", inside=False)
        again = lines.write("aten.mul_.Tensor", again, 2.0, name="twice")
        again = lines.write("aten.sub_.Tensor", again, 1.0, name="signed")
        return lines.write("aten.mul_.Tensor", again, tensor(size), name="unpacked")


GELU = FourPoints("aten.gelu_backward.default", 0.46902644222919954, 0.23021011154380255, 2.8914878456084363)
SILU = FourPoints("aten.silu_backward.default", 0.7892766768033946, 0.38462932688801993, 4.991476053914828)
