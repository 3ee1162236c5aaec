"""Writes the rows of the rematerialization benchmark as three small tables.

They are beside peers, by share of the activation budget, and beside other methods of planning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl

from stowage.flows.benchmarks.markdown import markdown
from stowage.flows.benchmarks.remat.names import AUTO, CHECKPOINTING, EAGER, EVERY_ROOT, MEMORY_BUDGET, TITLES
from stowage.flows.benchmarks.remat.rows import RematRow, fastest_within
from stowage.stages.ir.errors import MIB

SHARES = ("65%", "50%", "30%")
SMALLEST = "smallest"
NONE = "none"

Cells = Callable[[Sequence[RematRow], str], Sequence[str]]
"""Makes the cells of a model's line from all rows."""


def summary_of(rows: Sequence[RematRow]) -> str:
    """Return overheads over plain PyTorch as Markdown, a line a model.

    Those of `auto`'s plans are bold, with the prediction over keeping everything in brackets; *Stowage there* is the
    fastest of them within the peak to the left, for several peaks from the least overhead to the most.
    """
    tables: tuple[tuple[Sequence[str], Cells], ...] = (
        (("plain PyTorch", f"`{EVERY_ROOT}`", "Stowage there", f"`{MEMORY_BUDGET}`", "Stowage there"), beside_peers),
        ((*(f"Stowage at {share}" for share in SHARES), "smallest: peak, share, overhead"), by_share),
        (
            (
                *(f"Rotor at {share}, Stowage there" for share in SHARES),
                "its smallest, Stowage there",
                "Chen's √n, its smallest, Stowage there",
            ),
            beside_methods,
        ),
    )
    return "\n\n".join(_table(head, rows, cells) for head, cells in tables)


def _table(head: Sequence[str], rows: Sequence[RematRow], cells: Cells) -> str:
    columns = [str(k) for k in range(len(head))]
    lines = [(TITLES.get(m, m), *cells(rows, m)) for m in dict.fromkeys(r.model for r in rows)]
    frame = pl.DataFrame(lines, schema=dict.fromkeys(["model", *columns], pl.String), orient="row")
    return markdown(frame, headings={"model": "", **dict(zip(columns, head, strict=True))}, right=columns)


def beside_peers(rows: Sequence[RematRow], model: str) -> list[str]:
    """Make the cells of a model beside what PyTorch offers."""
    by_hand = _of(rows, model, EVERY_ROOT)
    note = ""
    if not by_hand and (by_hand := _of(rows, model, CHECKPOINTING)):
        note = "(Hugging Face's) "
    plain = _of(rows, model, EAGER)
    cells = [_peaks(plain)]
    for found, before in ((by_hand, note), (_of(rows, model, MEMORY_BUDGET), "")):
        there = [ours.overhead for r in found if (ours := fastest_within(rows, r))]
        cells.append(f"{before}{_peaks(found)}, {_span([r.overhead for r in found])}" if found else "")
        cells.append(f"**{_span(there)}**" if there else "")
    return cells


def by_share(rows: Sequence[RematRow], model: str) -> list[str]:
    """Make the cells of a model by share of the activation budget."""
    cells = []
    for setting in (*SHARES, SMALLEST):
        found = _of(rows, model, AUTO, setting)
        if not found:
            cells.append(NONE)
            continue
        (r,) = found
        peak = f"{_peaks(found)}, {_percent(r.activation_share)}, " if setting == SMALLEST else ""
        cells.append(f"{peak}**{_percent(r.overhead)}** ({_percent(r.predicted_overhead)})")
    return cells


def beside_methods(rows: Sequence[RematRow], model: str) -> list[str]:
    """Make the cells of a model beside Rotor and Chen's √n."""
    asked = [*(("rotor", share) for share in SHARES), ("rotor", SMALLEST), ("chen_sqrt", SMALLEST)]
    cells = []
    for method, setting in asked:
        found = _of(rows, model, method, setting)
        if not found:
            cells.append(NONE)
            continue
        (theirs,) = found
        ours = fastest_within(rows, theirs)
        peak = f"{_peaks(found)}, " if setting == SMALLEST else ""
        beside = f", **{_percent(ours.overhead)}**" if ours else ""
        cells.append(f"{peak}{_percent(theirs.overhead)}{beside}")
    return cells


def _of(rows: Sequence[RematRow], model: str, contestant: str, setting: str | None = None) -> list[RematRow]:
    """Return the measured rows of a contestant."""
    return [
        r
        for r in rows
        if (r.model, r.contestant) == (model, contestant) and setting in (None, r.setting) and not r.note
    ]


def _peaks(rows: Sequence[RematRow]) -> str:
    texts = [f"{peak / MIB:,.1f}" for peak in sorted(r.peak_bytes for r in rows)]
    return f"{_between(texts, '–')} MiB" if texts else ""


def _span(shares: Sequence[float]) -> str:
    texts = [_percent(share).removesuffix("%") for share in sorted(shares)]
    return f"{_between(texts, ' to ' if min(shares) < 0 else '–')}%"


def _between(texts: Sequence[str], to: str) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]}{to}{texts[-1]}"


def _percent(share: float) -> str:
    """Write a share in whole percent, with a minus that is as wide as digits."""
    return f"{round(share * 100)}%".replace("-", "−")
