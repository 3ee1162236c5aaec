"""The report on disk: `report.html`, and its plots as PNG in `plots/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary
from stowage.stages.ir.run import MemorySample, StepRecord, TraceSpan
from stowage.stages.ir.trace import Storage
from stowage.stages.report import figures
from stowage.stages.report.activations import block_fates
from stowage.stages.report.curves import measured, predicted, spans
from stowage.stages.report.facts import gather
from stowage.stages.report.page import Page
from stowage.stages.report.streams import streams_figure


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
    paths: Mapping[str, str | Path] | None = None,
    title: str = "Training step",
) -> Path:
    """Write the report of a plan, and of its run as far as there is one; equal input gives equal files.

    Args:
        folder: gets `report.html` and `plots/{memory,timeline,blocks,loss}.png`; each file is written atomically.
        options: schedules that were considered for each distinct block; listed where given.
        steps, memory: records of training; empty before it.
        streams: one iteration, predicted and measured; gives a section and `plots/streams.png` where not empty.
        paths: files that the page names, label to path: where the plan and `step.py` lie.
        title: what was trained, for people.

    Returns:
        The path of the page.
    """
    page_path = folder / "report.html"
    fates = block_fates(storages, nodes, blocks, plan_rows)
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
    pictures: dict[str, str] = {}
    for name, draw in drawings.items():
        pictures[name], png = figures.render(draw)
        write_atomically(folder / "plots" / f"{name}.png", png)
    named = {label: Path(path).as_posix() for label, path in (paths or {}).items()}
    page = Page(
        title=title,
        summary=summary,
        facts=gather(steps, memory),
        fates=fates,
        options=options,
        steps=steps,
        streams=streams,
        figures=pictures,
        paths={**named, "this report": page_path.as_posix(), "plots": (folder / "plots").as_posix()},
    )
    write_atomically(page_path, page.html().encode())
    return page_path
