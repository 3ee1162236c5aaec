"""The six planning stages in one process, with the same functions and stores as the pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import nn

from stowage.flows._plan_store import PlanStore
from stowage.stages.codegen import Manifest, emit_step, manifest_of
from stowage.stages.device import device_of
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary, Slot
from stowage.stages.ir.table import read_record, write_atomically, write_record, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.store import OptionStore
from stowage.stages.options.tasks import GridSize
from stowage.stages.partition import MAX_BLOCKS, Limits, make_blocks, make_chains
from stowage.stages.profile import CostStore, profile_variants
from stowage.stages.rewrite import rewrite_of, variants_of
from stowage.stages.settings.sizes import resolve_budget
from stowage.stages.solve import Below, PlanRequest, Solved, Variant, check_method, eager_peak_bytes, solve_variants
from stowage.stages.solve.request import WHOLE
from stowage.stages.solver.outcome import SolverSettings
from stowage.stages.trace import MicroBatch, Recorded, record_step, with_updates
from stowage.stages.workload.calls import Loss, Objective

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much time planning may take.

    Attributes:
        seconds_per_call, min_samples: measuring one distinct operation.
        grid: budgets per distinct block.
        solver: limits of one solve.
        slots: memory slots of RK-Rotor.
    """

    seconds_per_call: float = 0.3
    min_samples: int = 6
    grid: GridSize = field(default_factory=GridSize)
    solver: SolverSettings = field(default_factory=lambda: SolverSettings(time_limit_s=5.0))
    slots: int = 500


QUICK = Effort(
    seconds_per_call=0.01,
    min_samples=2,
    grid=GridSize(
        peak_budgets=2,
        save_budgets=2,
        computations=2,
        raced_nodes=0,
        greedy_levels=8,
        cluster_peaks=2,
        cluster_saves=1,
        top_peaks=3,
        top_saves=1,
        cluster_options=60,
    ),
    solver=SolverSettings(time_limit_s=0.5),
)
"""For trying out: a plan in seconds, less good."""


@dataclass(frozen=True)
class Planned:
    """A plan with its program and its tables.

    Attributes:
        options: what `solve` chose among; empty where the plan was solved before.
        source: the text of `step.py`; `folder` holds it, with the plan's tables.
        eager_peak_bytes: predicted total peak of plain PyTorch; with accumulation, of the last micro-batch.
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


def processor_s() -> float:
    """Processor time of this process and of its children that have ended, so far."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def home_folder(cache_dir: str | Path | None) -> Path:
    """Where costs, options and plans of `fit` live: the argument, `STOWAGE_HOME`, or the user's cache folder."""
    return Path(cache_dir or os.environ.get("STOWAGE_HOME") or platformdirs.user_cache_dir("stowage"))


def target_device(kind: str, home: Path) -> DeviceDescription:
    """This machine's device, measured once and remembered."""
    device = device_of(kind)
    path = home / "devices" / f"{device.fingerprint()}.json"
    try:
        return read_record(path, DeviceDescription)
    except TableError:
        description = device.describe(str(home))
        write_record(path, description)
        return description


@dataclass(frozen=True)
class Costed:
    """A step that is traced, profiled and cut: what planning chooses from, before any budget.

    Attributes:
        target: the device.
        variants: the trace and its rewrites, with nodes and blocks.
        eager_peak_bytes: see `Planned`.
        costs: of every distinct call.
        limits: sizes of the clusters of `WHOLE` methods; the defaults where there are none.
    """

    target: DeviceDescription
    variants: list[Variant]
    eager_peak_bytes: int
    costs: Sequence[Cost]
    limits: Limits | None = None
    _whole: list[Variant] = field(default_factory=list, init=False, repr=False, compare=False)
    _options: dict[tuple[bool, Path, Effort], list[Option]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def variants_for(self, method: str) -> list[Variant]:
        """Cut as a method wants it: `WHOLE` methods take one block."""
        if method not in WHOLE:
            return self.variants
        if not self._whole:
            traces = {rewrite_of(v.name): v.trace for v in self.variants}
            self._whole.extend(_cut(traces, self.costs, 1, self.limits))
        return self._whole

    def options_for(self, method: str, home: Path, effort: Effort) -> list[Option]:
        """Schedules of every distinct block of `variants_for`, solved or looked up once."""
        key = method in WHOLE, home, effort
        if key not in self._options:
            self._options[key] = block_options(self.variants_for(method), home, effort)
        return self._options[key]


def _cut(
    traces: Mapping[str, TraceTables], costs: Sequence[Cost], max_blocks: int, limits: Limits | None = None
) -> list[Variant]:
    by_signature = {c.signature: c for c in costs}
    return [
        Variant(name + chain, rewritten, made.nodes, made.blocks, made.clusters)
        for name, rewritten in traces.items()
        for chain, made in make_chains(rewritten, by_signature, max_blocks=max_blocks, limits=limits).items()
    ]


def cost_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    home: Path,
    objective: Objective | None = None,
    recorded: Recorded | None = None,
    micro_batch: MicroBatch | None = None,
    largest: MicroBatch | None = None,
    costs: str = "measured",
    effort: Effort | None = None,
    notices: list[str] | None = None,
    target: DeviceDescription | None = None,
    layouts: Mapping[str, torch.Tensor] | None = None,
    progress: Progress = lambda stage: None,
    profiled: Callable[[int, int], None] = lambda done, total: None,
) -> Costed:
    """Trace → profile → partition; see `plan_step`, and for `profiled` the progress of `profile_trace`."""
    effort = effort or Effort()
    progress("trace")
    if recorded is None:
        recorded = record_step(model, batch, loss=loss, objective=objective, layouts=layouts)
        if notices is not None:
            notices.extend(recorded.notices)
    trace = with_updates(recorded, model, optimizer=optimizer, micro_batch=micro_batch)
    progress("profile")
    target = target or target_device(trace.meta.device, home)
    traces = variants_of(trace)
    whole = trace if largest is None else with_updates(recorded, model, optimizer=optimizer, micro_batch=largest)
    known = profile_variants(
        [*traces.values(), *([whole] if largest is not None else [])],
        target,
        CostStore(home / "costs"),
        costs="roofline" if costs == "roofline" else "measured",
        seconds_per_call=effort.seconds_per_call,
        min_samples=effort.min_samples,
        progress=profiled,
    )
    progress("partition")
    return cost_traces(traces, known, whole, target)


def cost_traces(
    traces: Mapping[str, TraceTables],
    known: Sequence[Cost],
    whole: TraceTables,
    target: DeviceDescription,
) -> Costed:
    """From tables alone: no model, and no device that could run it.

    Args:
        traces: the variants of one trace, `plain` first; see `rewrite`.
        known: the cost of every distinct call.
        whole: the trace whose plain PyTorch peak a budget in percent is of.
        target: the device that the costs are from.
    """
    variants = _cut(traces, known, MAX_BLOCKS)
    again = whole is traces[rewrite_of(variants[0].name)]
    eager = eager_peak_bytes(
        whole, variants[0].nodes if again else make_blocks(whole, {c.signature: c for c in known})[0]
    )
    return Costed(target, variants, eager, known)


def block_options(variants: Iterable[Variant], home: Path, effort: Effort) -> list[Option]:
    """Schedules of every distinct block."""
    variants = list(variants)
    by_hash = options_for_blocks(
        [BlockGraph.from_json(b.graph) for variant in variants for b in variant.blocks],
        OptionStore(home / "options"),
        size=effort.grid,
        settings=effort.solver,
        workers=os.cpu_count() or 1,
        clusters=[c for variant in variants for c in variant.clusters],
    )
    return [option for found in by_hash.values() for option in found]


def plan_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    device_budget: str | int,
    method: str,
    home: Path,
    objective: Objective | None = None,
    recorded: Recorded | None = None,
    micro_batch: MicroBatch | None = None,
    largest: MicroBatch | None = None,
    costs: str = "measured",
    effort: Effort | None = None,
    notices: list[str] | None = None,
    target: DeviceDescription | None = None,
    below: Below | None = None,
    away: frozenset[str] = frozenset(),
    layouts: Mapping[str, torch.Tensor] | None = None,
    progress: Progress = lambda stage: None,
) -> Planned:
    """Trace → profile → partition → options → solve → codegen for one model and batch.

    Args:
        model, batch, loss, device_budget, method: see `fit`.
        optimizer: holds the model's parameters.
        home: folder of the stores.
        objective: `objective(model, batch)`, instead of `loss`, for those who call the model themselves.
        recorded: forward and backward of this batch, if traced before.
        micro_batch: what happens to gradients; by default they go into updates at once.
        largest: the micro-batch whose peak in plain PyTorch a budget in percent is of; by default `micro_batch`.
        costs: `measured` or `roofline`.
        effort: how much time planning may take.
        notices: receives what the user should know.
        target: the device; by default this machine's.
        below: the tier below the device, if the plan may use one.
        away: see `PlanRequest`.
        layouts: of parameters that are not in memory, see `trace_step`.
        progress: called with each stage's name as it starts.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    check_method(method)
    effort = effort or Effort()
    costed = cost_step(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        home=home,
        objective=objective,
        recorded=recorded,
        micro_batch=micro_batch,
        largest=largest,
        costs=costs,
        effort=effort,
        notices=notices,
        target=target,
        layouts=layouts,
        progress=progress,
    )
    return plan_costed(
        costed,
        device_budget=device_budget,
        method=method,
        home=home,
        effort=effort,
        below=below,
        away=away,
        progress=progress,
    )


def plan_costed(
    costed: Costed,
    *,
    device_budget: str | int,
    method: str,
    home: Path,
    effort: Effort,
    below: Below | None = None,
    away: frozenset[str] = frozenset(),
    progress: Progress = lambda stage: None,
) -> Planned:
    """Plan from tables alone: no model, and no device that could run it.

    Args:
        costed: the step; `cost_traces` makes it from tables.
        device_budget, method, home, effort, below, away, progress: see `plan_step`.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    target, variants, eager = costed.target, costed.variants_for(method), costed.eager_peak_bytes
    budget = resolve_budget(device_budget, eager, "device_budget")
    store = PlanStore(home / "solved")
    lasting = below.lasting() if below else None
    rates = target.fingerprint
    key = store.key(variants, budget, method, effort.grid, effort.solver, effort.slots, rates, lasting, sorted(away))
    solved = store.find(key, disk_room_bytes=below.disk_room_bytes if below else None)
    options: list[Option] = []
    if solved is None:
        progress("options")
        options = costed.options_for(method, home, effort)
        progress("solve")
        solved = solve_variants(
            variants,
            options,
            PlanRequest(
                device_budget_bytes=budget,
                method=method,
                slots=effort.slots,
                device=target.name,
                device_fingerprint=target.fingerprint,
                time_limit_s=effort.solver.time_limit_s,
                seed=effort.solver.seed,
                below=below,
                away=away,
            ),
        )
        store.add(key, solved)
    progress("codegen")
    chosen = next(v for v in variants if v.name == solved.summary.variant)
    trace, nodes, blocks = chosen.trace, list(chosen.nodes), list(chosen.blocks)
    return finish(trace, nodes, blocks, options, solved, home, eager)


def finish(
    trace: TraceTables,
    nodes: list[ComputeNode],
    blocks: list[Block],
    options: list[Option],
    solved: Solved,
    home: Path,
    eager_peak_bytes: int,
) -> Planned:
    """Generate `step.py` for a solved plan, and write it with its tables below `home`."""
    source = emit_step(trace, nodes, solved.rows, solved.summary, solved.slots)
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
            folder=home / "plans" / solved.summary.plan_hash,
            eager_peak_bytes=eager_peak_bytes,
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
    write_record(folder / "summary.json", planned.summary)
    write_atomically(folder / "step.py", planned.source.encode())
    write_record(folder / "manifest.json", planned.manifest)
    return planned
