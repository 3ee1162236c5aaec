"""Measures planning time against depth for models that recompute (thesis, figures 2.6 and 3.12).

Every stage, with empty stores, estimated or measured costs, and half of the activation budget that keeping everything
needs.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.papers.machines import MACHINES
from stowage.flows.benchmarks.remat.models import build
from stowage.flows.benchmarks.remat.names import Size
from stowage.flows.benchmarks.remat.points import METHODS, words
from stowage.flows.benchmarks.scaling.growth import GrowthRow, picture, ratios
from stowage.flows.planning.step import Effort, Planning, StepToPlan, cost_step, plan_costed, processor_s
from stowage.stages.ir.activations import device_budget, fixed_bytes
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import write_rows
from stowage.stages.options.tasks import GridSize
from stowage.stages.solver.outcome import SolverSettings

MODELS = ("transformer", "gpt2")
"""Models with a depth: L + L layers, and L."""

LAYERS = (2, 4, 6, 12, 24)
"""Depths, by default."""

SHARE = 0.5
"""Share of keep-all's activation budget that every plan gets."""

MACHINE = "RTX 3060"
"""The machine whose rates are used, unless costs are measured on this one."""

EFFORT = Effort(grid=GridSize(3, 3), solver=SolverSettings(time_limit_s=2.0))


@dataclass(frozen=True)
class DepthJob:
    """The plans to make.

    Attributes:
        models: some of `MODELS`.
        methods: methods of planning.
        layers: depths.
        size: size of the models besides their depth.
        effort: effort of planning.
        measured: use costs measured on this machine, not estimated ones.
    """

    models: tuple[str, ...] = MODELS
    methods: tuple[str, ...] = METHODS
    layers: tuple[int, ...] = LAYERS
    size: Size = "small"
    effort: Effort = EFFORT
    measured: bool = False


def depth_job(models: str, methods: str, layers: str, *, measured: bool = False) -> DepthJob:
    """Make the job from a command line; empty for the defaults. With measured costs everything is as in `fit`.

    Raises:
        ParameterError: a model has no depth, or a depth is no number.
    """
    if unknown := [name for name in words(models) if name not in MODELS]:
        raise ParameterError(f"--models names {', '.join(unknown)}: remat-depth takes {', '.join(MODELS)}.")
    if wrong := [text for text in words(layers) if not text.isdecimal() or not int(text)]:
        raise ParameterError(f"--layers names {', '.join(wrong)}: give whole numbers above 0.")
    depths = tuple(int(text) for text in words(layers))
    effort = Effort() if measured else EFFORT
    chosen = words(models) or MODELS, words(methods) or METHODS, depths or LAYERS
    return DepthJob(*chosen, effort=effort, measured=measured)


def plan_rows(
    model: str, method: str, layers: int, size: Size = "small", effort: Effort = EFFORT, *, measured: bool = False
) -> list[GrowthRow]:
    """Plan one model from nothing to `step.py`.

    A budget that the method cannot meet has a row too, with the time until that was known; its overhead is NaN.
    """
    case = build(model, size, layers)
    costs: dict[str, Any] = {} if measured else {"costs": "roofline", "target": MACHINES[MACHINE].device}
    marks: list[tuple[str, float]] = []

    def mark(stage: str) -> None:
        marks.append((stage, processor_s()))

    gc.collect()
    blocks, overhead = 0, float("nan")
    with tempfile.TemporaryDirectory() as empty:
        how = Planning(stores=Path(empty), effort=effort, method=method, progress=mark, **costs)
        costed = cost_step(StepToPlan(model=case.model, batch=case.batch, loss=case.loss), how)
        trace = costed.variants[0].trace
        try:
            budget = device_budget(fixed_bytes(trace), costed.eager_peak_bytes, SHARE)
            planned = plan_costed(costed, budget, how)
            blocks, s = len(planned.blocks), planned.summary
            overhead = s.step_time_s / s.lower_bound_s - 1
        except Infeasible:
            blocks = len(costed.variants[0].blocks)
        mark("total")
    seconds = {stage: end - start for (stage, start), (_, end) in pairwise(marks)}
    seconds["total"] = marks[-1][1] - marks[0][1]
    return [
        GrowthRow(model, method, layers, stage, taken, len(trace.calls), blocks, overhead)
        for stage, taken in seconds.items()
    ]


def depth_rows(job: DepthJob, say: Callable[[str], None] = lambda text: None) -> Iterator[GrowthRow]:
    """Plan every combination, shallow models first."""
    for layers in job.layers:
        for model in job.models:
            for method in job.methods:
                started = time.perf_counter()
                rows = plan_rows(model, method, layers, job.size, job.effort, measured=job.measured)
                taken = time.perf_counter() - started
                stages = ", ".join(f"{r.stage} {r.seconds:.1f} s" for r in rows)
                say(
                    f"{model}, {method}, {layers} layers, {rows[0].calls:,} calls: {stages} of processor time, "
                    f"{taken:.1f} s in all; {rows[0].overhead:+.1%}"
                )
                yield from rows


def run_depth(job: DepthJob, folder: Path, say: Callable[[str], None]) -> str:
    """Measure, write `remat_depth.parquet` and `remat_depth.png` into `folder`, and say what grew by how much."""
    rows = list(depth_rows(job, say))
    write_rows(folder / "remat_depth.parquet", GrowthRow, rows)
    write_atomically(folder / "remat_depth.png", picture(rows))
    return closing(rows)


def closing(rows: Sequence[GrowthRow]) -> str:
    """Say how much longer each stage took for the deepest model than for the shallowest."""
    least, most = min(r.layers for r in rows), max(r.layers for r in rows)
    return "\n".join(
        f"{model}, {method}, {most} over {least} layers: "
        + ", ".join(f"{stage} {ratio:.1f} ×" for stage, ratio in by_stage.items())
        for (model, method), by_stage in ratios(rows).items()
    )
