"""Makes the race's table: one row for each contestant, as Parquet and for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stowage.flows.benchmarks.gpu.contestant import ContestantResult
from stowage.stages.ir.errors import MIB

REFERENCE = "plain PyTorch, no limit"
REPEATED = "plain PyTorch, no limit, again"
EXTRAPOLATED = "plain PyTorch, extrapolated"


@dataclass(frozen=True)
class GpuRow:
    """One row of the race's table: a contestant.

    Attributes:
        contestant: its name.
        note: why there are no numbers, or how they came about.
        limit_bytes: limit of the process on the device, -1 for none.
        requested_bytes: see `ContestantResult`.
        peak_bytes: see `ContestantResult`.
        reserved_bytes: see `ContestantResult`.
        retries: see `ContestantResult`.
        timed_retries: see `ContestantResult`.
        out_of_memory: see `ContestantResult`.
        host_bytes: see `ContestantResult`.
        prepare_s: see `ContestantResult`.
        pin_s: see `ContestantResult`.
        time_s: see `ContestantResult`; NaN where there is none.
        spread: see `ContestantResult`.
        time_ratio: ratio to plain PyTorch without a limit, measured or else extrapolated; NaN where there is none.
        predicted_time_s: see `ContestantResult`.
        predicted_peak_bytes: see `ContestantResult`.
        clocks: the card's clocks before and after the timed iterations.
        losses: losses of every iteration.
        losses_equal: the losses are plain PyTorch's, bit for bit; None where one of them has none.
        worst_loss_difference: largest relative difference to plain PyTorch's losses, NaN where there is none.
        weights_equal: the weights at the end are plain PyTorch's, bit for bit; None where they were not compared.
    """

    contestant: str
    note: str
    limit_bytes: int
    requested_bytes: int
    peak_bytes: int
    reserved_bytes: int
    retries: int
    timed_retries: int
    out_of_memory: int
    host_bytes: int
    prepare_s: float
    pin_s: float
    time_s: float
    spread: float
    time_ratio: float
    predicted_time_s: float
    predicted_peak_bytes: int
    clocks: str
    losses: tuple[float, ...]
    losses_equal: bool | None
    worst_loss_difference: float
    weights_equal: bool | None


def extrapolate(
    few: int, one: ContestantResult, more: int, other: ContestantResult, layers: int
) -> ContestantResult | None:
    """Extrapolate time and peak of plain PyTorch to `layers` from two models with fewer: both grow by layer.

    None where one of the two has no numbers. The times are the median, and the bounds that follow from the spread of
    both.
    """
    if one.note or other.note:
        return None

    def line(a: float, b: float) -> float:
        return a + (b - a) * (layers - few) / (more - few)

    time_s = line(one.time_s, other.time_s)
    unsure = sum(
        abs(line(*unit)) * (max(result.times_s) - min(result.times_s)) / 2
        for unit, result in (((1.0, 0.0), one), ((0.0, 1.0), other))
    )
    known = one.peak_bytes >= 0 and other.peak_bytes >= 0
    return ContestantResult(
        note="",
        times_s=(time_s - unsure, time_s, time_s + unsure),
        peak_bytes=int(line(one.peak_bytes, other.peak_bytes)) if known else -1,
    )


def rows_of(
    results: Mapping[str, ContestantResult], limits: Mapping[str, int], notes: Mapping[str, str]
) -> list[GpuRow]:
    """Make the table, in the order of `results`.

    Args:
        results: results by name.
        limits: bytes by name; -1 for none.
        notes: texts by name, added to the notes of the results.
    """
    plain = results.get(REFERENCE)
    reference = plain if plain is not None and not plain.note else results.get(EXTRAPOLATED)
    expected = plain.losses if plain is not None else ()
    weights = plain.weights if plain is not None else ""
    rows = []
    for name, result in results.items():
        both = [*zip(result.losses, expected)] if "layers" not in name else []
        rows.append(
            GpuRow(
                contestant=name,
                note=". ".join(text for text in (result.note, notes.get(name, "")) if text),
                limit_bytes=limits.get(name, -1),
                requested_bytes=result.requested_bytes,
                peak_bytes=result.peak_bytes,
                reserved_bytes=result.reserved_bytes,
                retries=result.retries,
                timed_retries=result.timed_retries,
                out_of_memory=result.out_of_memory,
                host_bytes=result.host_bytes,
                prepare_s=result.prepare_s,
                pin_s=result.pin_s,
                time_s=result.time_s,
                spread=result.spread,
                time_ratio=result.time_s / reference.time_s if reference is not None else math.nan,
                predicted_time_s=result.predicted_time_s,
                predicted_peak_bytes=result.predicted_peak_bytes,
                clocks=" → ".join(result.clocks),
                losses=result.losses,
                losses_equal=all(a == b for a, b in both) if both else None,
                worst_loss_difference=max((abs(a / b - 1) for a, b in both), default=math.nan),
                weights_equal=result.weights == weights if weights and result.weights else None,
            )
        )
    return rows


COLUMNS = (
    *("", "limit", "requested", "allocated", "reserved", "retries", "host", "step", "±", "× plain", "predicted"),
    *("losses", ""),
)


def text_of(rows: list[GpuRow]) -> str:
    """Return the table for a terminal."""
    cells = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS) - 1)]

    def line(cell: tuple[str, ...]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cell, widths))]
        return "  ".join([*padded, cell[-1]]).rstrip()

    return "\n".join(map(line, cells))


def markdown_of(rows: list[GpuRow]) -> str:
    """Return the table for a page."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(_cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def noise_text(rows: list[GpuRow]) -> str:
    """Say in one sentence how plain PyTorch differs from itself; empty where it did not run twice."""
    again = next((row for row in rows if row.contestant == REPEATED), None)
    if again is None or again.losses_equal is None:
        return ""
    count = len(again.losses)
    found = f"noise of plain PyTorch against plain PyTorch over {count} iterations: losses {_losses(again)}"
    return f"{found}; nobody can be expected to be closer" if not again.losses_equal else found


def _losses(row: GpuRow) -> str:
    if row.losses_equal is None:
        return "–"
    text = "equal" if row.losses_equal else f"within {row.worst_loss_difference:.0e}"
    if row.weights_equal is None:
        return text
    return f"{text}, weights {'equal' if row.weights_equal else 'differ'}"


def _cells(row: GpuRow) -> tuple[str, ...]:
    def size(nbytes: int) -> str:
        return f"{nbytes / MIB:,.0f} MiB" if nbytes >= 0 else "–"

    def number(value: float, form: str) -> str:
        return form.format(value) if value == value else "–"

    retries = "–" if row.retries < 0 else str(row.retries)
    if row.out_of_memory > 0:
        retries += f", {row.out_of_memory} failed"
    return (
        row.contestant,
        size(row.limit_bytes),
        size(row.requested_bytes),
        size(row.peak_bytes),
        size(row.reserved_bytes),
        retries,
        size(row.host_bytes),
        number(row.time_s, "{:.3f} s"),
        number(row.spread, "{:.0%}"),
        number(row.time_ratio, "{:.2f}"),
        number(row.predicted_time_s, "{:.3f} s"),
        _losses(row),
        row.note,
    )
