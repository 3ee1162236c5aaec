"""Holds everything that a report is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary
from stowage.stages.ir.run import MemorySample, StepRecord, TraceSpan
from stowage.stages.ir.trace import Call, Storage


@dataclass(frozen=True, kw_only=True)
class ReportTables:
    """The tables of a plan, and of its run as far as there is one.

    Attributes:
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
    """

    storages: Sequence[Storage]
    nodes: Sequence[ComputeNode]
    blocks: Sequence[Block]
    plan_rows: Sequence[PlanRow]
    summary: PlanSummary
    options: Sequence[Option] = ()
    steps: Sequence[StepRecord] = ()
    memory: Sequence[MemorySample] = ()
    streams: Sequence[TraceSpan] = ()
    curve: Sequence[CurvePoint] = ()
    calls: Sequence[Call] = ()
    paths: Mapping[str, str | Path] = field(default_factory=dict)
    title: str = "Training step"
