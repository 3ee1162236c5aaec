"""Third step's result: one row for each contestant, as Parquet and for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stowage.flows._gpu_contestant import Result
from stowage.stages.ir.errors import MIB

REFERENCE = "plain PyTorch, no limit"
EXTRAPOLATED = "plain PyTorch, extrapolated"


@dataclass(frozen=True)
class GpuRow:
    """One contestant.

    Attributes:
        contestant: its name.
        note: why there are no numbers, or how they came about.
        limit_bytes: of the process on the device, -1 for none.
        peak_bytes, reserved_bytes, host_bytes, time_s, predicted_time_s, predicted_peak_bytes: see `Result`; -1 and NaN
            where there is none.
        time_ratio: to plain PyTorch without a limit, measured or else extrapolated; NaN where there is none.
        losses: of every iteration.
        losses_equal: to plain PyTorch's, bit for bit; None where one of them has none.
        worst_loss_difference: largest relative difference to them, NaN where there is none.
    """

    contestant: str
    note: str
    limit_bytes: int
    peak_bytes: int
    reserved_bytes: int
    host_bytes: int
    time_s: float
    time_ratio: float
    predicted_time_s: float
    predicted_peak_bytes: int
    losses: tuple[float, ...]
    losses_equal: bool | None
    worst_loss_difference: float


def extrapolate(few: int, one: Result, more: int, other: Result, layers: int) -> Result | None:
    """Time and peak of plain PyTorch with `layers`, from two models with fewer: both grow by the same for each layer.

    None where one of the two has no numbers.
    """
    if one.note or other.note:
        return None

    def line(a: float, b: float) -> float:
        return a + (b - a) * (layers - few) / (more - few)

    known = one.peak_bytes >= 0 and other.peak_bytes >= 0
    return Result(
        note="",
        times_s=(line(one.time_s, other.time_s),),
        peak_bytes=int(line(one.peak_bytes, other.peak_bytes)) if known else -1,
    )


def rows_of(results: Mapping[str, Result], limit_bytes: int, notes: Mapping[str, str]) -> list[GpuRow]:
    """The table, in the order of `results`; `notes` are added to those of the results."""
    plain = results.get(REFERENCE)
    reference = plain if plain is not None and not plain.note else results.get(EXTRAPOLATED)
    expected = plain.losses if plain is not None else ()
    rows = []
    for name, result in results.items():
        both = [*zip(result.losses, expected)] if "layers" not in name else []
        rows.append(
            GpuRow(
                contestant=name,
                note=" ".join(text for text in (result.note, notes.get(name, "")) if text),
                limit_bytes=-1 if name.startswith("plain PyTorch") else limit_bytes,
                peak_bytes=result.peak_bytes,
                reserved_bytes=result.reserved_bytes,
                host_bytes=result.host_bytes,
                time_s=result.time_s,
                time_ratio=result.time_s / reference.time_s if reference is not None else math.nan,
                predicted_time_s=result.predicted_time_s,
                predicted_peak_bytes=result.predicted_peak_bytes,
                losses=result.losses,
                losses_equal=all(a == b for a, b in both) if both else None,
                worst_loss_difference=max((abs(a / b - 1) for a, b in both), default=math.nan),
            )
        )
    return rows


COLUMNS = ("", "limit", "peak", "reserved", "host", "step", "× plain", "predicted", "losses", "")


def text_of(rows: list[GpuRow]) -> str:
    """The table for a terminal."""
    cells = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS) - 1)]

    def line(cell: tuple[str, ...]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cell, widths))]
        return "  ".join([*padded, cell[-1]]).rstrip()

    return "\n".join(map(line, cells))


def _cells(row: GpuRow) -> tuple[str, ...]:
    def size(nbytes: int) -> str:
        return f"{nbytes / MIB:,.0f} MiB" if nbytes >= 0 else "–"

    def number(value: float, form: str) -> str:
        return form.format(value) if value == value else "–"

    if row.losses_equal is None:
        losses = "–"
    else:
        losses = "equal" if row.losses_equal else f"within {row.worst_loss_difference:.0e}"
    return (
        row.contestant,
        size(row.limit_bytes),
        size(row.peak_bytes),
        size(row.reserved_bytes),
        size(row.host_bytes),
        number(row.time_s, "{:.3f} s"),
        number(row.time_ratio, "{:.2f}"),
        number(row.predicted_time_s, "{:.3f} s"),
        losses,
        row.note,
    )
