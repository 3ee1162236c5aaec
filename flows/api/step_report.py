"""Writes the report of a training step in a script: one HTML page."""

from __future__ import annotations

from pathlib import Path

from stowage.flows.api.history import History
from stowage.flows.planning.curve_result import Curve
from stowage.flows.planning.planned import Planned


def write_step_report(path: Path, title: str, planned: Planned, history: History, curve: Curve | None) -> Path:
    """Write the page.

    Args:
        path: path of the page.
        title: what is trained.
        planned: the plan of the latest call, with its tables.
        history: what the iterations took and gave.
        curve: memory against time of the same step, if it is known.
    """
    from stowage.stages.report import ReportTables, write_page  # matplotlib takes a second to import

    tables = ReportTables(
        storages=planned.trace.storages,
        nodes=planned.nodes,
        blocks=planned.blocks,
        plan_rows=planned.rows,
        summary=planned.summary,
        options=planned.options,
        steps=history.records(),
        memory=history.memory,
        streams=history.spans,
        curve=curve.points if curve is not None else (),
        calls=planned.trace.calls,
        paths={"plan": planned.folder, "this report": path},
        title=title,
    )
    return write_page(path, tables)
