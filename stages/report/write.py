"""Writes the report to disk: `report.html`, and its plots as PNG in `plots/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary
from stowage.stages.ir.run import MemorySample, StepRecord, TraceSpan
from stowage.stages.ir.trace import Call, Storage
from stowage.stages.report import figures
from stowage.stages.report.activations import block_fates
from stowage.stages.report.curves import measured, predicted, spans
from stowage.stages.report.data import write_curves
from stowage.stages.report.facts import gather
from stowage.stages.report.modules import module_of_peak, modules_of
from stowage.stages.report.page import Page
from stowage.stages.report.streams import streams_figure
from stowage.stages.report.tradeoff import tradeoff_figure


def write_report(
    folder: Path,
    *,
    storages: Sequence[Storage],
    nodes: Sequence[ComputeNode],
    blocks: Sequence[Block],
    plan_rows: Sequence[PlanRow],
    summary: PlanSummary,
    options: Sequence[Option] = (),
    steps: Sequence[StepRecord] = (),
    memory: Sequence[MemorySample] = (),
    streams: Sequence[TraceSpan] = (),
    curve: Sequence[CurvePoint] = (),
    calls: Sequence[Call] = (),
    paths: Mapping[str, str | Path] | None = None,
    title: str = "Training step",
) -> Path:
    """Write the report of a plan, and of its run as far as there is one; equal input gives equal files.

    Args:
        folder: gets `report.html`, `plots/{memory,timeline,blocks,loss}.png` and `curves/{memory,loss}.csv`; each file
            is written atomically.
        storages: storages of the trace.
        nodes: compute nodes of the trace.
        blocks: blocks of the chain.
        plan_rows: the plan.
        summary: the plan's summary.
        options: schedules that were considered for each distinct block; listed where given.
        steps: records of training; empty before it.
        memory: allocator samples of training; empty before it.
        streams: one iteration, predicted and measured; gives a section and `plots/streams.png` where not empty.
        curve: plans of the step within several budgets; gives a section and `plots/curve.png` where not empty.
        calls: calls of the trace; they name the modules.
        paths: files that the page names, label to path: where the plan and `step.py` are.
        title: what was trained, for people.

    Returns:
        The path of the page.
    """
    page_path = folder / "report.html"
    page, pngs = drawn(
        storages=storages,
        nodes=nodes,
        blocks=blocks,
        plan_rows=plan_rows,
        summary=summary,
        options=options,
        steps=steps,
        memory=memory,
        streams=streams,
        curve=curve,
        calls=calls,
        paths={**(paths or {}), "this report": page_path, "plots": folder / "plots"},
        title=title,
    )
    for name, png in pngs.items():
        write_atomically(folder / "plots" / f"{name}.png", png)
    write_curves(folder / "curves", plan_rows, memory, steps)
    write_atomically(page_path, page.html().encode())
    return page_path


def write_page(path: Path, **tables: Any) -> Path:
    """Write the page alone, which needs no other file.

    Args:
        path: the page to write.
        tables: the keywords of `write_report`, without the folder.

    Returns:
        The same path.
    """
    page, _ = drawn(**tables)
    write_atomically(path, page.html().encode())
    return path


def drawn(
    *,
    storages: Sequence[Storage],
    nodes: Sequence[ComputeNode],
    blocks: Sequence[Block],
    plan_rows: Sequence[PlanRow],
    summary: PlanSummary,
    options: Sequence[Option] = (),
    steps: Sequence[StepRecord] = (),
    memory: Sequence[MemorySample] = (),
    streams: Sequence[TraceSpan] = (),
    curve: Sequence[CurvePoint] = (),
    calls: Sequence[Call] = (),
    paths: Mapping[str, str | Path] | None = None,
    title: str = "Training step",
) -> tuple[Page, dict[str, bytes]]:
    """Make the page, and its plots as PNG; see `write_report`."""
    modules = modules_of(nodes, calls) if calls else {}
    fates = block_fates(storages, nodes, blocks, plan_rows, modules)
    drawings = {
        "memory": lambda: figures.memory_figure(
            predicted(plan_rows), measured(memory, "measured"), measured(memory, "eager"), summary.device_budget_bytes
        ),
        "timeline": lambda: figures.timeline_figure(spans(plan_rows, nodes)),
        "blocks": lambda: figures.blocks_figure(fates),
        "loss": lambda: figures.loss_figure(steps),
    }
    if streams:
        drawings["streams"] = lambda: streams_figure(streams)
    if any(point.feasible for point in curve):
        drawings["curve"] = lambda: tradeoff_figure(
            curve, summary.keep_all_peak_bytes, summary.device_budget_bytes + summary.reserve_bytes
        )
    pictures: dict[str, str] = {}
    pngs: dict[str, bytes] = {}
    for name, draw in drawings.items():
        pictures[name], pngs[name] = figures.render(draw)
    page = Page(
        title=title,
        summary=summary,
        facts=gather(steps, memory),
        fates=fates,
        options=options,
        steps=steps,
        streams=streams,
        figures=pictures,
        paths={label: Path(path).as_posix() for label, path in (paths or {}).items()},
        peak_at=module_of_peak(plan_rows, {n.node: n for n in nodes}, modules),
    )
    return page, pngs
