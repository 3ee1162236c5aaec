"""Keeps a plan with its program and its tables, in memory and in its folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from stowage.stages.codegen import Manifest, emit_step, manifest_of
from stowage.stages.ir.amounts import size_text
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary, Slot
from stowage.stages.ir.table import write_record, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import Unit
from stowage.stages.runtime.executors.base import ExecutablePlan
from stowage.stages.solve import Solved


@dataclass(frozen=True)
class Planned:
    """A plan with its program and its tables.

    Attributes:
        trace: the tables of the step.
        nodes: its compute nodes.
        blocks: its blocks.
        options: what `solve` chose among; empty where the plan was solved before.
        rows: the plan's actions, with times and bytes.
        slots: places of tensors in the lower tier.
        summary: the plan's summary.
        source: the text of `step.py`; `folder` holds it, with the plan's tables.
        manifest: what `step.py` is valid for.
        folder: the plan's folder.
        eager_peak_bytes: predicted total peak of plain PyTorch; with accumulation, of the last micro-batch.
        units: groups of parameters that a step may freeze; none where nothing is ever frozen.
    """

    trace: TraceTables
    nodes: list[ComputeNode]
    blocks: list[Block]
    options: list[Option]
    rows: list[PlanRow]
    slots: list[Slot]
    summary: PlanSummary
    source: str
    manifest: Manifest
    folder: Path
    eager_peak_bytes: int
    units: list[Unit] = field(default_factory=list)

    def executable(self) -> ExecutablePlan:
        """Return what an executor needs of the plan."""
        path, budget = self.folder / "step.py", self.summary.device_budget_bytes
        return ExecutablePlan(self.source, self.manifest, path, self.trace, self.slots, budget, self.units)

    def digest(self) -> str:
        """Return a hash of what runs: the actions in their order, the slots, and the text of `step.py`."""
        actions = [(r.action, r.node, r.storage, r.step, r.recompute) for r in self.rows]
        content = repr((actions, self.slots, self.units, self.source))
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def __repr__(self) -> str:
        return (
            f"<{len(self.rows)} rows for {len(self.nodes)} nodes in {len(self.blocks)} blocks; plain PyTorch takes "
            f"{size_text(self.eager_peak_bytes)}; in {self.folder}\n {self.summary!r}>"
        )


def finish(
    trace: TraceTables,
    nodes: list[ComputeNode],
    blocks: list[Block],
    options: list[Option],
    solved: Solved,
    stores: Path,
    eager_peak_bytes: int,
) -> Planned:
    """Generate `step.py` for a solved plan, and write it with its tables into a folder in `stores`."""
    source = emit_step(trace, nodes, solved.rows, solved.summary, solved.slots, solved.units)
    return write_plan(
        Planned(
            trace=trace,
            nodes=nodes,
            blocks=blocks,
            options=options,
            rows=solved.rows,
            slots=solved.slots,
            summary=solved.summary,
            source=source,
            manifest=manifest_of(source, solved.summary.plan_hash, trace.meta.configuration_hash),
            folder=stores / "plans" / solved.summary.plan_hash,
            eager_peak_bytes=eager_peak_bytes,
            units=solved.units,
        )
    )


def write_plan(planned: Planned) -> Planned:
    """Write a plan with its tables and its `step.py` into its folder."""
    folder = planned.folder
    planned.trace.save(folder / "trace")
    write_rows(folder / "nodes.parquet", ComputeNode, planned.nodes)
    write_rows(folder / "blocks.parquet", Block, planned.blocks)
    write_rows(folder / "plan.parquet", PlanRow, planned.rows)
    write_rows(folder / "slots.parquet", Slot, planned.slots)
    if planned.units:
        write_rows(folder / "units.parquet", Unit, planned.units)
    write_record(folder / "summary.json", planned.summary)
    write_atomically(folder / "step.py", planned.source.encode())
    write_record(folder / "manifest.json", planned.manifest)
    return planned
