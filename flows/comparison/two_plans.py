"""Reads finished plans for a comparison: from a folder of artifacts, or as they were at a Git revision."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stowage.flows.pipeline.dvc import dvc_command, run_quietly
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import PlanRow, PlanSummary
from stowage.stages.ir.table import read_record, read_rows
from stowage.stages.ir.trace import Storage, TraceMeta, TraceTables
from stowage.stages.rewrite import stored_variant

_FILES = (
    "trace/meta.json",
    "trace/storages.parquet",
    "trace/values.parquet",
    "trace/calls.parquet",
    "trace/gradients.parquet",
    "trace/constants.parquet",
    "partition/nodes.parquet",
    "partition/blocks.parquet",
    "solve/plan.parquet",
    "solve/summary.json",
)


@dataclass(frozen=True)
class Side:
    """One of the two plans of a comparison."""

    meta: TraceMeta
    storages: list[Storage]
    nodes: list[ComputeNode]
    blocks: list[Block]
    rows: list[PlanRow]
    summary: PlanSummary


def read_side(folder: Path) -> Side:
    """Read a plan from a folder that is laid out as `artifacts/` is.

    Raises:
        TableError: a file is missing, damaged, or not ours.
    """
    summary = read_record(folder / "solve" / "summary.json", PlanSummary)
    nodes = read_rows(folder / "partition" / "nodes.parquet", ComputeNode)
    blocks = read_rows(folder / "partition" / "blocks.parquet", Block)
    step = stored_variant(TraceTables.load(folder / "trace"), nodes, blocks, summary.variant)
    return Side(
        meta=step.trace.meta,
        storages=step.trace.storages,
        nodes=list(step.nodes),
        blocks=list(step.blocks),
        rows=read_rows(folder / "solve" / "plan.parquet", PlanRow),
        summary=summary,
    )


@contextlib.contextmanager
def folder_of(root: Path, name: str) -> Iterator[Path]:
    """Yield the artifacts that `name` stands for: a folder, or a Git revision whose plan DVC still has.

    DVC's cache or a remote must have them.

    Raises:
        StowageError: the revision's plan cannot be had.
    """
    if Path(name).is_dir():
        yield Path(name)
        return
    with tempfile.TemporaryDirectory() as temporary:
        for file in _FILES:
            target = Path(temporary) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            command = dvc_command("get", "--quiet", "--rev", name, "--out", str(target), ".", f"artifacts/{file}")
            code, _ = run_quietly(command, root)
            if code != 0:
                raise StowageError(
                    f"artifacts/{file} of {name} is not at hand: run `dvc repro` there, or `dvc fetch --all-commits`."
                )
        yield Path(temporary)
