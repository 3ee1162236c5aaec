"""Traces, profiles and cuts a step into blocks: what planning chooses from, before any budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.planning.effort import Effort, target_device
from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.defaults import MAX_BLOCKS, MAX_EXACT_NODES
from stowage.stages.ir.methods import method_of
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.optimizers import Bench, KnownOptimizer
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.store import OptionStore
from stowage.stages.partition import Limits, make_blocks, make_chains
from stowage.stages.profile import CostStore, profile_variants
from stowage.stages.rewrite import variants_of
from stowage.stages.solve import Variant, eager_peak_bytes
from stowage.stages.trace import MicroBatch, Recorded, parameters_of, record_step, with_updates
from stowage.stages.workload.calls import Loss, Objective

Progress = Callable[[str], None]
Part = Callable[[int, int], None]
"""Receives how many parts of a stage are done, of how many."""


@dataclass(frozen=True)
class Costed:
    """A step that is traced, profiled and cut into blocks: what planning chooses from, before any budget.

    Attributes:
        target: the device.
        variants: the trace and its rewrites, with nodes and blocks.
        eager_peak_bytes: see `Planned`.
        costs: costs of every distinct call.
        limits: sizes of the clusters of methods that take the whole step as one block; the defaults where None.
        max_exact_nodes: blocks with more nodes are cut into clusters.
    """

    target: DeviceDescription
    variants: list[Variant]
    eager_peak_bytes: int
    costs: Sequence[Cost]
    limits: Limits | None = None
    max_exact_nodes: int = MAX_EXACT_NODES
    _whole: dict[Limits | None, list[Variant]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _options: dict[tuple[bool, str, tuple[int, int] | None, Path, Effort], list[Option]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def variants_for(self, method: str) -> list[Variant]:
        """Return the variants, cut as a method needs them: some take the whole step as one block."""
        if not method_of(method).whole:
            return self.variants
        limits = self.limits
        if limits is None and (sizes := method_of(method).sizes) is not None:
            limits = Limits(*sizes)
        if limits not in self._whole:
            traces = {VariantName.of(v.name).rewrite: v.trace for v in self.variants}
            self._whole[limits] = _cut(traces, self.costs, 1, self.max_exact_nodes, limits)
        return self._whole[limits]

    def options_for(
        self, method: str, stores: Path, effort: Effort, part: Part = lambda done, total: None
    ) -> list[Option]:
        """Return schedules of every distinct block of `variants_for`, solved or looked up once."""
        wanted = method_of(method)
        clusters = wanted.clusters or effort.grid.cluster_formulation
        key = wanted.whole, clusters, wanted.sizes, stores, effort
        if key not in self._options:
            effort = replace(effort, grid=replace(effort.grid, cluster_formulation=clusters))
            self._options[key] = block_options(self.variants_for(method), stores, effort, part)
        return self._options[key]


def _cut(
    traces: Mapping[str, TraceTables],
    costs: Sequence[Cost],
    max_blocks: int,
    max_exact_nodes: int,
    limits: Limits | None = None,
) -> list[Variant]:
    by_signature = {c.signature: c for c in costs}
    how = {"max_blocks": max_blocks, "max_exact_nodes": max_exact_nodes}
    return [
        Variant(VariantName(name, chain).text, rewritten, made.nodes, made.blocks, made.clusters)
        for name, rewritten in traces.items()
        for chain, made in make_chains(rewritten, by_signature, **how, limits=limits).items()
    ]


def cost_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | KnownOptimizer | None,
    stores: Path,
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
    profiled: Part = lambda done, total: None,
) -> Costed:
    """Trace, profile and partition a step; see `plan_step`, and for `profiled` the progress of `profile_trace`.

    Raises:
        FakeKernelError: `recorded` says something else of a call than its kernel does; it must be recorded anew.
    """
    effort = effort or Effort()
    said = notices if notices is not None else []

    def cost() -> Costed:
        if recorded is None:
            progress("trace")
        made = recorded or record_step(model, batch, loss=loss, objective=objective, layouts=layouts)
        if recorded is None:
            said.extend(n for n in made.notices if n not in said)
        return cost_recorded(
            made,
            model,
            optimizer=optimizer,
            stores=stores,
            micro_batch=micro_batch,
            largest=largest,
            costs=costs,
            effort=effort,
            notices=said,
            target=target,
            progress=progress,
            profiled=profiled,
        )

    return cost() if recorded is not None else with_true_kernels(cost)


def cost_recorded(
    recorded: Recorded,
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | KnownOptimizer | None,
    stores: Path,
    micro_batch: MicroBatch | None,
    largest: MicroBatch | None,
    costs: str,
    effort: Effort,
    notices: list[str],
    target: DeviceDescription | None,
    progress: Progress,
    profiled: Callable[[int, int], None],
) -> Costed:
    """Profile and partition a step that is traced; see `plan_step`."""
    learnt = KnownOptimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    trace = with_updates(recorded, model, optimizer=learnt, micro_batch=micro_batch)
    progress("profile")
    target = target or target_device(trace.meta.device, stores)
    traces = variants_of(trace)
    whole = trace if largest is None else with_updates(recorded, model, optimizer=learnt, micro_batch=largest)
    known = profile_variants(
        [*traces.values(), *([whole] if largest is not None else [])],
        target,
        CostStore(stores / "costs"),
        costs="roofline" if costs == "roofline" else "measured",
        seconds_per_call=effort.seconds_per_call,
        min_samples=effort.min_samples,
        make_update=Bench(learnt.optimizer, parameters_of(model, recorded.outside)) if learnt is not None else None,
        progress=profiled,
        notice=notices.append,
    )
    progress("partition")
    return cost_traces(traces, known, whole, target, effort.grid.max_exact_nodes)


def cost_traces(
    traces: Mapping[str, TraceTables],
    known: Sequence[Cost],
    whole: TraceTables,
    target: DeviceDescription,
    max_exact_nodes: int = MAX_EXACT_NODES,
) -> Costed:
    """Cut variants into blocks from tables alone: no model, and no device that could run it.

    Args:
        traces: the variants of one trace, `plain` first; see `rewrite`.
        known: the cost of every distinct call.
        whole: the trace whose plain PyTorch peak a budget in percent is of.
        target: the device that the costs are from.
        max_exact_nodes: blocks with more nodes are cut into clusters.
    """
    variants = _cut(traces, known, MAX_BLOCKS, max_exact_nodes)
    again = whole is traces[VariantName.of(variants[0].name).rewrite]
    eager = eager_peak_bytes(
        whole, variants[0].nodes if again else make_blocks(whole, {c.signature: c for c in known})[0]
    )
    return Costed(target, variants, eager, known, max_exact_nodes=max_exact_nodes)


def block_options(
    variants: Iterable[Variant], stores: Path, effort: Effort, part: Part = lambda done, total: None
) -> list[Option]:
    """Return schedules of every distinct block."""
    variants = list(variants)
    by_hash = options_for_blocks(
        [BlockGraph.from_json(b.graph) for variant in variants for b in variant.blocks],
        OptionStore(stores / "options"),
        size=effort.grid,
        settings=effort.solver,
        workers=os.cpu_count() or 1,
        clusters=[c for variant in variants for c in variant.clusters],
        progress=part,
    )
    return [option for found in by_hash.values() for option in found]
