"""Writes the report to disk: `report.html`, and its plots as PNG in `plots/`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stowage.stages.ir.files import write_atomically
from stowage.stages.report import figures
from stowage.stages.report.activations import block_fates
from stowage.stages.report.curves import measured, predicted, spans
from stowage.stages.report.data import write_curves
from stowage.stages.report.facts import gather
from stowage.stages.report.modules import module_of_peak, modules_of
from stowage.stages.report.page import Page
from stowage.stages.report.streams import streams_figure
from stowage.stages.report.tables import ReportTables
from stowage.stages.report.tradeoff import tradeoff_figure


def write_report(folder: Path, tables: ReportTables) -> Path:
    """Write the report of a plan, and of its run as far as there is one; equal input gives equal files.

    Args:
        folder: gets `report.html`, `plots/{memory,timeline,blocks,loss}.png` and `curves/{memory,loss}.csv`; each file
            is written atomically.
        tables: the plan and its run.

    Returns:
        The path of the page.
    """
    page_path = folder / "report.html"
    paths = {**tables.paths, "this report": page_path, "plots": folder / "plots"}
    page, pngs = drawn(replace(tables, paths=paths))
    for name, png in pngs.items():
        write_atomically(folder / "plots" / f"{name}.png", png)
    write_curves(folder / "curves", tables.plan_rows, tables.memory, tables.steps)
    write_atomically(page_path, page.html().encode())
    return page_path


def write_page(path: Path, tables: ReportTables) -> Path:
    """Write the page alone, which needs no other file; return its path."""
    page, _ = drawn(tables)
    write_atomically(path, page.html().encode())
    return path


def drawn(tables: ReportTables) -> tuple[Page, dict[str, bytes]]:
    """Make the page, and its plots as PNG."""
    summary, nodes, plan_rows = tables.summary, tables.nodes, tables.plan_rows
    modules = modules_of(nodes, tables.calls) if tables.calls else {}
    fates = block_fates(tables.storages, nodes, tables.blocks, plan_rows, modules)
    drawings = {
        "memory": lambda: figures.memory_figure(
            predicted(plan_rows),
            measured(tables.memory, "measured"),
            measured(tables.memory, "eager"),
            summary.device_budget_bytes,
        ),
        "timeline": lambda: figures.timeline_figure(spans(plan_rows, nodes)),
        "blocks": lambda: figures.blocks_figure(fates),
        "loss": lambda: figures.loss_figure(tables.steps),
    }
    if tables.streams:
        drawings["streams"] = lambda: streams_figure(tables.streams)
    if any(point.feasible for point in tables.curve):
        drawings["curve"] = lambda: tradeoff_figure(
            tables.curve, summary.keep_all_peak_bytes, summary.device_budget_bytes + summary.reserve_bytes
        )
    pictures: dict[str, str] = {}
    pngs: dict[str, bytes] = {}
    for name, draw in drawings.items():
        pictures[name], pngs[name] = figures.render(draw)
    page = Page(
        title=tables.title,
        summary=summary,
        facts=gather(tables.steps, tables.memory),
        fates=fates,
        options=tables.options,
        steps=tables.steps,
        streams=tables.streams,
        figures=pictures,
        paths={label: Path(path).as_posix() for label, path in tables.paths.items()},
        peak_at=module_of_peak(plan_rows, {n.node: n for n in nodes}, modules),
    )
    return page, pngs
