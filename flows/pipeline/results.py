"""Collects what a flow run returns, and keeps it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from stowage.flows.benchmarks.markdown import markdown as to_markdown
from stowage.flows.pipeline.workspace import Workspace
from stowage.stages.ir.errors import size_text
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.table import read_record


@dataclass(frozen=True)
class RunResult:
    """The outcome of a flow.

    Attributes:
        folder: the artifacts: `solve/summary.json`, `codegen/step.py`, ... One that was made with overrides can be
            given to `stowage.flows.compare` as it is.
        summary: the plan's summary.
    """

    folder: Path
    summary: PlanSummary


def collect(workspace: Workspace, stages: Sequence[str]) -> RunResult:
    """Copy the artifacts of `stages` out of a workspace that is removed afterwards, and read the plan's summary."""
    if workspace.temporary:
        beside = workspace.results.with_suffix(".partial")
        shutil.rmtree(beside, ignore_errors=True)
        for name in stages:
            source = workspace.root / "artifacts" / name
            if source.is_dir():
                shutil.copytree(source, beside / name, ignore=shutil.ignore_patterns(".gitignore"))
        shutil.copyfile(workspace.root / "params.yaml", beside / "params.yaml")
        shutil.rmtree(workspace.results, ignore_errors=True)
        beside.replace(workspace.results)
    return RunResult(workspace.results, read_record(workspace.results / "solve" / "summary.json", PlanSummary))


def markdown(result: RunResult) -> str:
    """Return a plan's summary for people, as Markdown."""
    plan = result.summary
    slower = plan.step_time_s / plan.keep_all_time_s - 1 if plan.keep_all_time_s > 0 else 0.0
    smaller = 1 - plan.device_peak_bytes / plan.keep_all_peak_bytes if plan.keep_all_peak_bytes > 0 else 0.0
    rows = [
        ("method", plan.method),
        ("device", plan.device),
        ("budget", size_text(plan.device_budget_bytes)),
        (
            "predicted peak",
            f"{size_text(plan.device_peak_bytes)} ({smaller:.0%} below {size_text(plan.keep_all_peak_bytes)})",
        ),
        ("predicted step", f"{plan.step_time_s:.3f} s ({slower:.1%} above {plan.keep_all_time_s:.3f} s)"),
        ("solver", f"{plan.solver}: {plan.status}, gap {plan.gap:.2%}"),
        ("artifacts", f"`{result.folder}`"),
    ]
    frame = pl.DataFrame(rows, schema={"what": pl.String, "value": pl.String}, orient="row")
    return to_markdown(frame, headings={"what": "", "value": ""})
