"""Measures how planning time grows with the number of layers: every stage, for GPT-2 and Llama, with empty stores."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import torch

from stowage.flows.benchmarks.papers.machines import MACHINES
from stowage.flows.benchmarks.scaling.growth_figure import growth_figure
from stowage.flows.planning.step import Effort, Planning, StepToPlan, plan_step, processor_s
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import write_rows
from stowage.stages.options.tasks import GridSize
from stowage.stages.report.figures import render
from stowage.stages.report.frames import frame_of
from stowage.stages.solver.outcome import SolverSettings
from stowage.stages.workload import build_workload

LAYERS = (8, 16, 32, 64, 128)
WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 512, 8, 128, 16, 1024

MACHINE = "RTX 3060"
"""The machine whose rates are used."""

BUDGET = {"rockmate": "60%", "offmate": "20%"}
"""Method -> device budget as a share of plain PyTorch's peak; the second is less than parameters and states take."""

METHODS = tuple(BUDGET)


def shape(architecture: str, layers: int) -> dict[str, Any]:
    """Return the configuration of a narrow model."""
    if architecture == "gpt2":
        return {
            "n_layer": layers,
            "n_embd": WIDTH,
            "n_head": HEADS,
            "n_positions": LENGTH,
            "vocab_size": VOCABULARY,
        }
    return {
        "num_hidden_layers": layers,
        "hidden_size": WIDTH,
        "intermediate_size": 1376,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": LENGTH,
        "vocab_size": VOCABULARY,
    }


@dataclass(frozen=True)
class GrowthRow:
    """One stage of one plan.

    Attributes:
        model: name of the model.
        method: method of planning.
        layers: number of layers.
        stage: its name; `total` is all of them.
        seconds: processor time, child processes included: others on the machine do not count.
        calls: number of calls.
        blocks: number of blocks.
        overhead: predicted step time over the lower bound, less 1.
    """

    model: str
    method: str
    layers: int
    stage: str
    seconds: float
    calls: int
    blocks: int
    overhead: float


def plan_rows(model: str, method: str, layers: int) -> list[GrowthRow]:
    """Plan one model from nothing to `step.py`, on fake tensors and estimated costs."""
    workload = build_workload(model, shape(model, layers), batch_size=BATCH, sequence_length=LENGTH, seed=0, fake=True)
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4)
    marks: list[tuple[str, float]] = []
    gc.collect()
    with tempfile.TemporaryDirectory() as empty:
        how = Planning(
            stores=Path(empty),
            effort=Effort(grid=GridSize(3, 3), solver=SolverSettings(time_limit_s=2.0)),
            costs="roofline",
            target=MACHINES[MACHINE].device,
            method=method,
            lower_tier=MACHINES[MACHINE].lower_tier if method == "offmate" else None,
            progress=lambda stage: marks.append((stage, processor_s())),
        )
        step = StepToPlan(model=workload.model, batch=workload.batch, optimizer=optimizer)
        planned = plan_step(step, BUDGET[method], how)
        marks.append(("total", processor_s()))
    s = planned.summary
    seconds = {stage: end - start for (stage, start), (_, end) in pairwise(marks)}
    seconds["total"] = marks[-1][1] - marks[0][1]
    size = len(planned.trace.calls), len(planned.blocks), s.step_time_s / s.lower_bound_s - 1
    return [GrowthRow(model, method, layers, stage, taken, *size) for stage, taken in seconds.items()]


def growth(
    layers: Sequence[int] = LAYERS,
    models: Sequence[str] = ("gpt2", "llama"),
    methods: Sequence[str] = METHODS,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[GrowthRow]:
    """Plan every combination, shallow models first."""
    for model in models:
        for method in methods:
            for count in layers:
                rows = plan_rows(model, method, count)
                stages = ", ".join(f"{r.stage} {r.seconds:.2f} s" for r in rows)
                say(f"{model}, {method}, {count} layers: {stages}; {rows[0].overhead:+.1%}")
                yield from rows


def ratios(rows: Sequence[GrowthRow]) -> dict[tuple[str, str], dict[str, float]]:
    """Map (model, method) and stage to the stage's time for the deepest model over that for the shallowest.

    A stage that one of the two did not reach, for want of a plan, is left out.
    """
    frame = frame_of(GrowthRow, rows)
    key = ["model", "method", "stage"]
    deepest = frame.filter(pl.col("layers") == pl.col("layers").max())
    shallowest = frame.filter((pl.col("layers") == pl.col("layers").min()) & (pl.col("seconds") > 0))
    both = deepest.join(shallowest.select(*key, first="seconds"), on=key, maintain_order="left")
    found: dict[tuple[str, str], dict[str, float]] = {}
    for model, method, stage, ratio in both.select(*key, pl.col("seconds") / pl.col("first")).iter_rows():
        found.setdefault((model, method), {})[stage] = ratio
    return found


def run_growth(folder: Path, say: Callable[[str], None]) -> str:
    """Measure, write `growth.parquet` and `growth.png` into `folder`, and say what grew by how much."""
    rows = list(growth(say=say))
    write_rows(folder / "growth.parquet", GrowthRow, rows)
    write_atomically(folder / "growth.png", picture(rows))
    lines = [
        f"{model}, {method}, {max(LAYERS)} over {min(LAYERS)} layers: "
        + ", ".join(f"{stage} {ratio:.1f} ×" for stage, ratio in by_stage.items())
        for (model, method), by_stage in ratios(rows).items()
    ]
    return "\n".join(lines)


def picture(rows: Sequence[GrowthRow]) -> bytes:
    """Draw the plot as PNG."""
    cases: dict[str, dict[str, list[tuple[int, float]]]] = {}
    case = pl.format("{}, {}", "model", "method").alias("case")
    lines = frame_of(GrowthRow, rows).sort("layers", maintain_order=True)
    for title, stage, layers, seconds in lines.select(case, "stage", "layers", "seconds").iter_rows():
        cases.setdefault(title, {}).setdefault(stage, []).append((layers, seconds))
    return render(lambda: growth_figure(cases))[1]
