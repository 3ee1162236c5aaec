"""Spans of time: a plan's prediction as spans, and spans as a Chrome trace, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from stowage.stages.ir.actions import ACTIONS, PlanAction, shown_lanes
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow, Slot
from stowage.stages.ir.run import TraceSpan

SERIES = ("predicted", "measured")


def predicted_spans(
    rows: Sequence[PlanRow], nodes: Sequence[ComputeNode], slots: Iterable[Slot] = ()
) -> list[TraceSpan]:
    """Return the steps of the cycle, waits, copies and updates of a plan, as its rows state them."""
    slot_of = {s.storage: s for s in slots}
    by_node = {n.node: n for n in nodes}
    found: list[TraceSpan] = []

    def add(stream: PlanAction, name: str, nbytes: int, start_s: float, end_s: float) -> None:
        found.append(TraceSpan("predicted", stream, name, nbytes, start_s, end_s))

    label, began, clock = "", 0.0, 0.0
    for row in rows:
        if row.step != label:
            if label:
                add("compute", label, 0, began, clock)
            label, began = row.step, clock
        kind = ACTIONS[row.action]
        if not kind.beside:
            clock = row.end_s
        if row.action == "compute":
            node = by_node[row.node]
            if node.phase == "update":
                add("update", node.name, 0, row.start_s, row.end_s)
            continue
        name, nbytes = by_node[row.node].name if kind.on_node else "", 0
        if row.storage in slot_of:
            name, nbytes = slot_of[row.storage].name, slot_of[row.storage].nbytes
        if kind.ends and row.end_s > row.start_s:
            add(row.action, f"{row.action} for {name}", 0, row.start_s, row.end_s)
        elif kind.beside:
            add(row.action, name, nbytes, row.start_s, row.end_s)
    if label:
        add("compute", label, 0, began, clock)
    return found


def steps_of(spans: Iterable[TraceSpan], series: str) -> list[TraceSpan]:
    """Return the steps of the cycle of a series, in order."""
    return sorted((s for s in spans if s.series == series and s.stream == "compute"), key=lambda s: s.start_s)


def chrome_trace(spans: Sequence[TraceSpan], labels: Mapping[str, str] | None = None) -> str:
    """Write the Trace Event Format: a process for each series, a thread for each lane, microseconds.

    Args:
        spans: spans of any series.
        labels: facts that the file states about itself.
    """
    start_s = min((s.start_s for s in spans), default=0.0)
    events: list[dict[str, object]] = []
    threads = shown_lanes()
    for pid, series in enumerate(SERIES, 1):
        events.append(_meta("process_name", pid, 0, name=series))
        events.append(_meta("process_sort_index", pid, 0, sort_index=pid))
        for tid, thread in enumerate(threads, 1):
            events.append(_meta("thread_name", pid, tid, name=thread))
            events.append(_meta("thread_sort_index", pid, tid, sort_index=tid))
        mine = [s for s in spans if s.series == series]
        for span in sorted(mine, key=lambda s: (s.start_s, -s.end_s)):
            seconds = span.end_s - span.start_s
            arguments: dict[str, object] = {}
            if span.nbytes:
                arguments["bytes"] = span.nbytes
                if seconds > 0:
                    arguments["bytes_per_s"] = round(span.nbytes / seconds)
            events.append(
                {
                    "name": span.name,
                    "cat": span.stream,
                    "ph": "X",
                    "pid": pid,
                    "tid": 1 + threads.index(ACTIONS[span.stream].lane),
                    "ts": round((span.start_s - start_s) * 1e6, 3),
                    "dur": round(seconds * 1e6, 3),
                    "args": arguments,
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(labels or {})})


def _meta(kind: str, pid: int, tid: int, **arguments: object) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
