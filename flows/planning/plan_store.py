"""Keeps solved plans by everything that they depend on, so that the same question is not solved twice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from stowage.stages.freezing.stored import check_plan
from stowage.stages.ir.code import code_hash
from stowage.stages.ir.errors import IllegalPlanError, TableError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow, PlanSummary, Slot
from stowage.stages.ir.table import read_record, read_rows, write_record, write_rows
from stowage.stages.ir.units import Unit
from stowage.stages.options.store import code_of_options
from stowage.stages.rewrite import variant_named
from stowage.stages.solve import Solved, Variant

PLANNERS = tuple(
    f"stowage.stages.{name}"
    for name in ("formulations", "freezing", "ir", "options", "partition", "rewrite", "simulate", "solve", "solver")
)
"""Packages whose code decides how plans are made."""


def code_of_plans() -> tuple[str, ...]:
    """Return hashes of the code that makes plans, formulations elsewhere included, and of the solvers."""
    return code_hash(*PLANNERS), *code_of_options()


class PlanStore:
    """A folder of solved plans."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def key(self, variants: Sequence[Variant], *question: object) -> str:
        """Return the key of a question: programs with costs and clusters, and other values with a faithful `repr`."""
        digest = hashlib.sha256(repr(code_of_plans()).encode())
        for variant in variants:
            digest.update(variant.trace.meta.configuration_hash.encode())
            digest.update(repr([_cost(n) for n in variant.nodes]).encode())
            digest.update(repr([(c.block_hash, c.children) for c in variant.clusters]).encode())
        digest.update(repr(question).encode())
        return digest.hexdigest()[:20]

    def find(
        self, key: str, variants: Sequence[Variant], *, budget_bytes: int, disk_room_bytes: int | None = None
    ) -> Solved | None:
        """Return a stored plan that is whole, legal for the referee, and within the budget and the disk's room.

        None where there is no such plan; one that is not whole can be solved again, and is then replaced.
        """
        folder = self._folder / key
        try:
            solved = Solved(
                read_rows(folder / "plan.parquet", PlanRow),
                read_record(folder / "summary.json", PlanSummary),
                read_rows(folder / "slots.parquet", Slot),
                read_rows(folder / "units.parquet", Unit) if (folder / "units.parquet").exists() else [],
            )
            variant = variant_named(variants, solved.summary.variant)
            if variant is None or solved.summary.device_budget_bytes != budget_bytes:
                return None
            check_plan(variant.trace, variant.nodes, solved.rows, solved.slots, solved.summary, solved.units)
        except (TableError, IllegalPlanError):
            return None
        if disk_room_bytes is not None and solved.summary.disk_bytes > disk_room_bytes:
            return None
        return solved

    def add(self, key: str, solved: Solved) -> None:
        """Keep a plan; each file is written atomically, the summary last."""
        folder = self._folder / key
        write_rows(folder / "plan.parquet", PlanRow, solved.rows)
        write_rows(folder / "slots.parquet", Slot, solved.slots)
        if solved.units:
            write_rows(folder / "units.parquet", Unit, solved.units)
        write_record(folder / "summary.json", solved.summary)


def _cost(node: ComputeNode) -> tuple[object, ...]:
    return node.node, node.time_s, node.workspace_bytes, node.reads, node.creates, node.mutates, node.block, node.takes
