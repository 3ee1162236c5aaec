"""Packs a value into codes of fewer bits and unpacks it again, in plain ATen calls that are timed like any others.

A codec is two functions that write calls. What is unpacked has the form of the value: its type, shape and strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from stowage.stages.ir.trace import TraceTables, Value
from stowage.stages.rewrite.lossy.bits import GELU, SILU, AboveZero, is_contiguous
from stowage.stages.rewrite.lossy.bounded import within_unit
from stowage.stages.rewrite.lossy.emitter import Form, Lines, tensor
from stowage.stages.rewrite.lossy.largest import BITS, Largest
from stowage.stages.rewrite.lossy.saved import ITEM_BYTES, Saved

Codes = Sequence[int]
"""The values that are kept instead of the one that is packed."""

SMALLEST_ROW = 16
"""Fewest elements that have a scale of their own."""

GROUP = 64
"""Elements that share a scale, where there is one for each group."""

TINY = {"float32": 1e-30, "bfloat16": 1e-30, "float16": 6e-8}
"""Least scale of values of each type: rows of zeros have one too."""


@dataclass(frozen=True)
class Codec:
    """A way to keep a value in fewer bits.

    Attributes:
        name: its name in variants, for people, and where leave is given.
        bits: bits of an element, scales left out.
        can_pack: says whether it can pack a value.
        pack: writes calls that pack a value, and returns what is kept.
        unpack: writes calls that make a value of the same form from what is kept.
        exact: whether backward computes the same bits with it.
        alone: it packs what one operator of backward reads, and nothing is computed again of it.
        leave: the kind under which leave is given; its name by default.
        unpack_frozen: `unpack` in steps in which what decides is frozen, where that is another: then the codec is of
            use only in steps that freeze.
    """

    name: str
    bits: float
    can_pack: Callable[[TraceTables, Saved], bool]
    pack: Callable[[Lines, int], Codes]
    unpack: Callable[[Lines, Codes, Value], int]
    exact: bool = False
    alone: bool = False
    leave: str = ""
    unpack_frozen: Callable[[Lines, Codes, Value], int] | None = None

    @property
    def kind(self) -> str:
        """Return the kind under which leave is given."""
        return self.leave or self.name

    @property
    def for_freezing(self) -> bool:
        """Return whether it is of use only in steps that freeze."""
        return self.unpack_frozen is not None

    def while_frozen(self) -> Codec:
        """Return what it does in steps in which what decides is frozen."""
        return replace(self, unpack=self.unpack_frozen, unpack_frozen=None) if self.unpack_frozen else self

    def fits(self, trace: TraceTables, saved: Saved) -> bool:
        """Say whether it can pack a value and what goes with it, in fewer bits than they have."""
        return all(
            self.bits < 8 * ITEM_BYTES[trace.values[part.base].dtype]
            and self.can_pack(trace, replace(saved, base=part.base, storage=part.storage))
            for part in saved.parts
        )


def _any(trace: TraceTables, saved: Saved) -> bool:
    return True


def _flat(multiple: int) -> Callable[[TraceTables, Saved], bool]:
    """Say of contiguous values whether their elements can be divided into so many equal parts."""

    def fits(trace: TraceTables, saved: Saved) -> bool:
        row = trace.values[saved.base]
        return is_contiguous(row) and math.prod(row.shape) % multiple == 0

    return fits


def copied(lines: Lines, value: int, dtype: str, name: str, *, inside: bool = False) -> int:
    """Write a copy into another type, and return it."""
    form, to = Form.like(lines.form(value), dtype), {"dtype": dtype}
    return lines.make("aten._to_copy.default", tensor(value), form=form, name=name, inside=inside, dtype=to)


def _cast(dtype: str, limit: float | None, lines: Lines, value: int) -> Codes:
    """Keep a value in another floating-point type, within the numbers that this type has."""
    if limit is not None:
        form = Form.like(lines.form(value))
        value = lines.make("aten.clamp.default", tensor(value), -limit, limit, form=form, name="within", inside=True)
    return [copied(lines, value, dtype, "codes")]


def _cast_back(lines: Lines, codes: Codes, row: Value) -> int:
    return copied(lines, codes[0], row.dtype, "again")


def _halves(lines: Lines, codes: int) -> int:
    """Write two codes of −8 … 7 into each byte: those of the second half of the value into the upper four bits."""
    row = lines.form(codes)
    count = math.prod(row.shape)
    half = Form.contiguous("int8", (count // 2,))
    flat = lines.view("aten.view.default", codes, [count], name="flat", shape=(count,))
    low = lines.view("aten.slice.Tensor", flat, 0, 0, count // 2, name="low", shape=half.shape)
    high = lines.view("aten.slice.Tensor", flat, 0, count // 2, count, name="high", shape=half.shape, offset=count // 2)
    low = lines.make("aten.add.Tensor", tensor(low), 8, form=half, name="raised", inside=True)
    return lines.make("aten.add.Tensor", tensor(low), tensor(high), form=half, name="codes", alpha=16)


def _wholes(lines: Lines, codes: int, row: Value) -> int:
    """Write the codes of −8 … 7 that `_halves` put into bytes, in the shape of the value."""
    half = Form.like(lines.form(codes))
    low = lines.make("aten.bitwise_and.Scalar", tensor(codes), 15, form=half, name="low", inside=True)
    low = lines.write("aten.sub_.Tensor", low, 8, name="lowered")
    shift = "aten.bitwise_right_shift.Tensor_Scalar"
    high = lines.make(shift, tensor(codes), 4, form=half, name="high", inside=True)
    count = math.prod(row.shape)
    whole = Form.contiguous("int8", (count,))
    both = lines.make("aten.cat.default", [tensor(low), tensor(high)], form=whole, name="both", inside=True)
    return lines.view("aten.view.default", both, list(row.shape), name="shaped", shape=row.shape)


@dataclass(frozen=True)
class _Fixed:
    """Fixed point as SlimFit has it (Algorithm 2): round(x / step) within the codes' range, without a scale.

    Attributes:
        step: what codes that follow each other differ by.
        low, high: the least and the largest code.
        dtype: the type of a code.
    """

    step: float
    low: int
    high: int
    dtype: str = "int8"

    def pack(self, lines: Lines, value: int) -> Codes:
        form = Form.like(lines.form(value))
        steps = lines.make("aten.mul.Tensor", tensor(value), 1 / self.step, form=form, name="steps", inside=True)
        steps = lines.write("aten.round_.default", steps, name="rounded")
        steps = lines.write("aten.clamp_.default", steps, self.low, self.high, name="within")
        if self.high - self.low > 15:
            return [copied(lines, steps, self.dtype, "codes")]
        return [_halves(lines, copied(lines, steps, self.dtype, "bytes", inside=True))]

    def unpack(self, lines: Lines, codes: Codes, row: Value) -> int:
        own = codes[0] if self.high - self.low > 15 else _wholes(lines, codes[0], row)
        again = copied(lines, own, row.dtype, "again")
        return lines.write("aten.mul_.Tensor", again, self.step, name="unpacked")


@dataclass(frozen=True)
class _Scaled:
    """Whole numbers of −levels … levels, with a scale for each tensor, row or group.

    Attributes:
        levels: the largest code.
        per: what has a scale of its own.
    """

    levels: int
    per: str

    def fits(self, trace: TraceTables, saved: Saved) -> bool:
        row = trace.values[saved.base]
        if self.levels < 8 and not _flat(2)(trace, saved):
            return False
        if self.per == "row":
            return bool(row.shape) and row.shape[-1] >= SMALLEST_ROW
        return self.per == "tensor" or _flat(GROUP)(trace, saved)

    def _grouped(self, lines: Lines, value: int) -> int:
        if self.per != "group":
            return value
        shape = (math.prod(lines.form(value).shape) // GROUP, GROUP)
        return lines.view("aten.view.default", value, list(shape), name="groups", shape=shape)

    def pack(self, lines: Lines, value: int) -> Codes:
        value = self._grouped(lines, value)
        row = lines.form(value)
        form = Form.like(row)
        over = [len(row.shape) - 1] if self.per != "tensor" else list(range(len(row.shape)))
        small = Form.contiguous(row.dtype, tuple(1 if i in over else n for i, n in enumerate(row.shape)))
        # Sizes and steps share their memory.
        sizes = lines.make("aten.abs.default", tensor(value), form=form, name="sizes", inside=True)
        scale = lines.make("aten.amax.default", tensor(sizes), over, True, form=small, name="scale")
        scale = lines.write("aten.mul_.Tensor", scale, 1 / self.levels, name="step")
        scale = lines.write("aten.clamp_min_.default", scale, TINY[row.dtype], name="least")
        steps = lines.write("aten.copy_.default", sizes, tensor(value), name="copy")
        steps = lines.write("aten.div_.Tensor", steps, tensor(scale), name="steps")
        steps = lines.write("aten.round_.default", steps, name="rounded")
        steps = lines.write("aten.clamp_.default", steps, -self.levels, self.levels, name="within")
        if self.levels > 7:
            return [copied(lines, steps, "int8", "codes"), scale]
        return [_halves(lines, copied(lines, steps, "int8", "bytes", inside=True)), scale]

    def unpack(self, lines: Lines, codes: Codes, row: Value) -> int:
        own = codes[0]
        if self.levels < 8:
            own = _wholes(lines, own, row)
        elif self.per == "group":
            own = lines.view("aten.view.default", own, list(row.shape), name="shaped", shape=row.shape)
        again = copied(lines, own, row.dtype, "again")
        groups = self._grouped(lines, again)
        groups = lines.write("aten.mul_.Tensor", groups, tensor(codes[1]), name="unpacked")
        if self.per != "group":
            return groups
        return lines.view("aten.view.default", groups, list(row.shape), name="ungrouped", shape=row.shape)


def _codecs() -> list[Codec]:
    found = [
        Codec("bf16", 16, _any, partial(_cast, "bfloat16", None), _cast_back),
        Codec("fp8_e4m3", 8, _any, partial(_cast, "float8_e4m3fn", 448.0), _cast_back),
        Codec("fp8_e5m2", 8, _any, partial(_cast, "float8_e5m2", 57344.0), _cast_back),
    ]
    for name, bits, fixed, fits in (
        ("fixed8", 8, _Fixed(1 / 16, -128, 127), _any),
        ("fixed8_unit", 8, _Fixed(1 / 256, 0, 255, "uint8"), within_unit),
        ("fixed4", 4, _Fixed(1 / 2, -8, 7), _flat(2)),
    ):
        found.append(Codec(name, bits, fits, fixed.pack, fixed.unpack))
    for bits, levels in ((8, 127), (4, 7)):
        for per in ("row", "tensor", "group"):
            scaled = _Scaled(levels, per)
            name = f"int{bits}" if per == "row" else f"int{bits}_{per}"
            found.append(Codec(name, bits, scaled.fits, scaled.pack, scaled.unpack))
    return [
        *found,
        Codec("relu1bit", 1, AboveZero.fits, AboveZero.pack, AboveZero.unpack, exact=True, alone=True),
        Codec("gelu2bit", 2, GELU.fits, GELU.pack, GELU.unpack, alone=True),
        Codec("silu2bit", 2, SILU.fits, SILU.pack, SILU.unpack, alone=True),
        Codec("top10", BITS, Largest.fits, Largest.pack, Largest.unpack, alone=True),
        Codec(
            "top10_frozen",
            BITS,
            Largest.fits_while_frozen,
            Largest.pack,
            Largest.unpack_unless_trained,
            alone=True,
            leave="top10",
            unpack_frozen=Largest.unpack,
        ),
    ]


CODECS: dict[str, Codec] = {codec.name: codec for codec in _codecs()}
"""Codecs by name."""


def allowed(kinds: Iterable[str], *, freezes: bool) -> tuple[str, ...]:
    """Return the names of the codecs that leave for some kinds is for, in a step that freezes or not."""
    wanted = set(kinds)
    return tuple(c.name for c in CODECS.values() if c.kind in wanted and (freezes or not c.for_freezing))
