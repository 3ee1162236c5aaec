"""Writes the pages of `docs/measured`, and the tables of the README, from the data beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from stowage.flows.benchmarks.markdown import markdown
from stowage.flows.benchmarks.pages.measurement import Measurement, read_measurement
from stowage.flows.benchmarks.pages.sections import FIRST_MINUTE_IN_README, IN_README, PAGES
from stowage.flows.benchmarks.pages.table import Column, Section, TablePage
from stowage.stages.ir.files import write_atomically

WRITTEN = (
    "<!-- Written by `python -m stowage.flows.benchmark render docs/measured` from data/; changes here are lost. -->"
)


def write_pages(folder: Path) -> list[Path]:
    """Write every page of `folder` and the tables of the README above it, from `folder/data`.

    Returns:
        what was written.
    """
    written = [_write(folder / f"{page.name}.md", page_text(page, folder)) for page in PAGES]
    written.append(_write(folder / "index.md", index_text(folder)))
    readme = folder.parents[1] / "README.md"
    if readme.exists():
        written.append(_write(readme, with_tables(readme.read_text(encoding="utf-8"), folder)))
    return written


def _write(path: Path, text: str) -> Path:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text.encode())
    return path


def measurement_of(section: Section, folder: Path) -> Measurement | None:
    """Read the data of a section; None where it was not measured yet."""
    path = folder / "data" / f"{section.name}.json"
    return read_measurement(path) if path.exists() else None


def table_of(section: Section, measurement: Measurement) -> str:
    """Write the rows of a measurement as the section's table."""
    rows = measurement.rows
    columns = [c for c in section.columns if not c.optional or any(row.get(c.key) is not None for row in rows)]
    cells = {c.key: [_cell(c, row) for row in rows] for c in columns}
    return markdown(
        pl.DataFrame(cells, schema=dict.fromkeys(cells, pl.String)),
        headings={c.key: c.heading for c in columns},
        right=[c.key for c in columns if c.right],
    )


def lines_of(section: Section, measurement: Measurement) -> str:
    """Write the rows of a measurement as a list, a line each: the words first, then the numbers."""
    first, *others = section.columns
    numbers = (
        ", ".join(f"**{c.write(row[c.key])}** {c.heading}" for c in others if row.get(c.key) is not None)
        for row in measurement.rows
    )
    return "\n".join(f"- {row[first.key]}: {text}" for row, text in zip(measurement.rows, numbers, strict=True))


def _cell(column: Column, row: Mapping[str, Any]) -> str | None:
    value = row.get(column.key)
    if value is None:
        return None
    stands_out = column.bold_with and row.get(column.bold_with) is not None
    return f"**{column.write(value)}**" if stands_out else column.write(value)


def page_text(page: TablePage, folder: Path) -> str:
    """Write one page."""
    parts = [f"# {page.title}", WRITTEN, page.intro]
    for section in page.sections:
        measurement = measurement_of(section, folder)
        if section.title:
            parts.append(f"## {section.title}")
        parts.append(section.about)
        parts += [_origin(measurement), table_of(section, measurement)] if measurement else [_not_yet(section)]
        parts += list(measurement.notes) if measurement else []
        if section.picture:
            parts.append(f"![{section.title or page.title}](../images/{section.picture})")
    return "\n\n".join(part for part in parts if part) + "\n"


def _origin(m: Measurement) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in m.versions.items())
    anew = f"anew: `{m.command}`" if m.command else "no command makes it anew"
    return f"*Measured {m.date} on {m.machine}; {packages}; {anew}; data: [{m.section}.json](data/{m.section}.json).*"


def _not_yet(section: Section) -> str:
    return f"*Not measured yet; `{section.command}` does.*"


def index_text(folder: Path) -> str:
    """Write the list of all measurements."""
    found = [(page, s, m) for page in PAGES for s in page.sections if (m := measurement_of(s, folder))]
    frame = pl.DataFrame(
        {
            "what": [f"[{s.title or page.title}]({page.name}.md{_anchor(s)})" for page, s, _ in found],
            "measured": [m.date for *_, m in found],
            "on": [m.machine for *_, m in found],
            "by": [f"`{m.command}`" if m.command else "" for *_, m in found],
        }
    )
    intro = (
        "A command measures, keeps its rows as data with the day, the machine and the versions, and writes the page "
        "from them. Where no command is named, something else measured, and its rows were put into the data. "
        "`python -m stowage.flows.benchmark main-job --write docs/measured` does it for the main job, and so do the "
        "other commands (`remat --write docs/measured`); `render docs/measured` writes all pages again from the data."
        "\n\n**No GPU has been measured.** Everything here ran on CPUs, or was planned for a card from its rates, and "
        "says so."
    )
    return "\n\n".join(["# Everything that was measured", WRITTEN, intro, markdown(frame)]) + "\n"


def _anchor(section: Section) -> str:
    words = re.sub(r"[^\w\s-]", "", section.title.lower()).split()
    return f"#{'-'.join(words)}" if words else ""


def with_tables(text: str, folder: Path) -> str:
    """Put what the README shows between its marks: a line for each plan of the first minute, and tables."""
    writers: dict[str, tuple[Section, Callable[[Section, Measurement], str]]] = {
        "first-minute": (FIRST_MINUTE_IN_README, lines_of),
        **{mark: (section, table_of) for mark, section in IN_README.items()},
    }
    for mark, (section, write) in writers.items():
        measurement = measurement_of(section, folder)
        if measurement:
            table = write(section, measurement)
            text = re.sub(
                rf"(<!-- {mark}:start -->\n).*?(<!-- {mark}:end -->)",
                lambda found, table=table: f"{found[1]}{table}\n{found[2]}",  # type: ignore[misc]
                text,
                flags=re.DOTALL,
            )
    return text


def sections_by_name() -> dict[str, Section]:
    """List the sections of all pages."""
    sections: Sequence[Section] = [s for page in PAGES for s in page.sections]
    return {s.name: s for s in sections}
