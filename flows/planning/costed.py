"""Traces, profiles and cuts a step into blocks: what planning chooses from, before any budget."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from stowage.flows.planning.effort import Effort, target_device
from stowage.flows.planning.job import Costing, Part, StepToPlan
from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.defaults import MAX_BLOCKS, MAX_EXACT_NODES, METHOD
from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.methods import method_of
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.optimizers import Bench, KnownOptimizer
from stowage.stages.options.generate import fixed_options, options_for_blocks
from stowage.stages.options.store import OptionStore
from stowage.stages.partition import Limits, make_blocks, make_variants
from stowage.stages.profile import CostStore, profile_variants
from stowage.stages.rewrite import rewritten, variants_of
from stowage.stages.rewrite.lossy import Classes, allowed, choices
from stowage.stages.solve import Variant, eager_peak_bytes
from stowage.stages.trace import Recorded, parameters_of, record_step, with_updates

_Key = tuple[bool, str, tuple[int, int] | None, Path, Effort]
"""What schedules of blocks depend on."""


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
        errors: what kinds of codes do to the gradient, where some may be used.
        max_gradient_error: the limit of what they may do together.
    """

    target: DeviceDescription
    variants: list[Variant]
    eager_peak_bytes: int
    costs: Sequence[Cost]
    limits: Limits | None = None
    max_exact_nodes: int = MAX_EXACT_NODES
    errors: Sequence[GradientError] = ()
    max_gradient_error: float = math.inf
    _whole: dict[Limits | None, list[Variant]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _options: dict[_Key, list[Option]] = field(default_factory=dict, init=False, repr=False, compare=False)

    _fixed: dict[tuple[bool, tuple[int, int] | None], list[Option]] = field(
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
        """Return schedules of every distinct block of `variants_for`, solved or looked up once.

        A policy that ignores the budget takes no schedule that has to be solved for.
        """
        if method_of(method).fixed:
            return self.fixed_options_for(method)
        key = self._key(method, stores, effort)
        if key not in self._options:
            effort = replace(effort, grid=replace(effort.grid, cluster_formulation=_clusters(method, effort)))
            self._options[key] = block_options(self.variants_for(method), stores, effort, part)
        return self._options[key]

    def options_at_hand(self, method: str, stores: Path, effort: Effort) -> list[Option]:
        """Return `options_for`, or what fixed policies make where rules have sufficed so far."""
        rules = effort.rules_suffice and method == METHOD and self._key(method, stores, effort) not in self._options
        return self.fixed_options_for(method) if rules else self.options_for(method, stores, effort)

    def fixed_options_for(self, method: str) -> list[Option]:
        """Return what fixed policies make of every distinct block of `variants_for`."""
        wanted = method_of(method)
        key = wanted.whole, wanted.sizes
        if key not in self._fixed:
            graphs = [BlockGraph.from_json(b.graph) for v in self.variants_for(method) for b in v.blocks]
            self._fixed[key] = [option for found in fixed_options(graphs).values() for option in found]
        return self._fixed[key]

    def _key(self, method: str, stores: Path, effort: Effort) -> _Key:
        wanted = method_of(method)
        return wanted.whole, _clusters(method, effort), wanted.sizes, stores, effort


def _clusters(method: str, effort: Effort) -> str:
    return method_of(method).clusters or effort.grid.cluster_formulation


def _cut(
    traces: Mapping[str, TraceTables],
    costs: Sequence[Cost],
    max_blocks: int,
    max_exact_nodes: int,
    limits: Limits | None = None,
) -> list[Variant]:
    by_signature = {c.signature: c for c in costs}
    made_of = make_variants(traces, by_signature, max_blocks=max_blocks, max_exact_nodes=max_exact_nodes, limits=limits)
    return [
        Variant(VariantName(name, chain).text, traces[name], made.nodes, made.blocks, made.clusters)
        for name, chains in made_of.items()
        for chain, made in chains.items()
    ]


def cost_step(step: StepToPlan, how: Costing) -> Costed:
    """Trace, profile and partition a step.

    Raises:
        FakeKernelError: `step.recorded` says something else of a call than its kernel does; it must be recorded anew.
    """

    def cost() -> Costed:
        how.progress("trace")
        made = record_step(
            step.model,
            step.batch,
            loss=step.loss,
            objective=step.objective,
            layouts=step.layouts,
            freezes=how.freeze is not None,
        )
        how.notices.extend(n for n in made.notices if n not in how.notices)
        return cost_recorded(made, step, how)

    return with_true_kernels(cost) if step.recorded is None else cost_recorded(step.recorded, step, how)


def cost_recorded(recorded: Recorded, step: StepToPlan, how: Costing) -> Costed:
    """Profile and partition a step that is traced."""
    optimizer = step.optimizer
    learnt = KnownOptimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    trace = with_updates(recorded, step.model, optimizer=learnt, micro_batch=step.micro_batch)
    how.progress("profile")
    target = how.target or target_device(trace.meta.device, how.stores)
    traces, whole = variants_of(trace), trace
    if step.largest is not None:
        whole = with_updates(recorded, step.model, optimizer=learnt, micro_batch=step.largest)

    def profiled(measured: Iterable[TraceTables]) -> list[Cost]:
        return profile_variants(
            measured,
            target,
            CostStore(how.stores / "costs"),
            costs="roofline" if how.costs == "roofline" else "measured",
            seconds_per_call=how.effort.seconds_per_call,
            min_samples=how.effort.min_samples,
            make_update=Bench(learnt.optimizer, parameters_of(step.model, recorded.outside)) if learnt else None,
            progress=how.profiled,
            notice=how.notices.append,
        )

    extra = [whole] if step.largest is not None else []
    errors: Sequence[GradientError] = ()
    if step.leave is not None:
        freezable = how.freeze.freezable(trace) if how.freeze is not None else None
        extra += Classes(trace).everywhere(allowed(step.leave.lossy.kinds, freezes=freezable is not None))
    known = profiled([*traces.values(), *extra])
    if step.leave is not None:
        how.progress("errors")
        errors = step.leave.errors(trace, step.leave.lossy)
        if how.freeze is not None and freezable is not None:
            errors = how.freeze.errors_of(errors, freezable)
        frozen = freezable.frozen_share if freezable is not None else None
        names = choices(trace, {c.signature: c for c in known}, errors, step.leave.lossy, frozen)
        traces |= {name: rewritten(trace, name) for name in names}
        known = profiled([*traces.values(), *extra])
    if how.freeze is not None:
        known = how.freeze.with_copies(known, traces.values())
    how.progress("partition")
    costed = cost_traces(traces, known, whole, target, how.effort.grid.max_exact_nodes)
    limit = step.leave.lossy.max_gradient_error if step.leave is not None else math.inf
    return replace(costed, errors=errors, max_gradient_error=limit)


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
