"""Plans one model within one budget: training steps on any batch, and forwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from stowage.flows.api.buckets import NEAR, bucket_sizes, largest_block_bytes, plan_by_buckets
from stowage.flows.api.budget import RunBudget
from stowage.flows.api.evaluation import Resting, plan_forward
from stowage.flows.planning.costed import Costed, cost_step
from stowage.flows.planning.curve import CurvePlanner
from stowage.flows.planning.effort import Effort, target_device
from stowage.flows.planning.freezing import Freezing
from stowage.flows.planning.job import Leave, Planning, StepToPlan
from stowage.flows.planning.planned import Planned, finish
from stowage.flows.planning.progress import Watch
from stowage.flows.planning.sizes import AtOnce, Sizes, everything_kept
from stowage.flows.planning.step import plan_costed
from stowage.stages.device.rates.collectives import CollectiveRates
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.errors import StowageError, TableError
from stowage.stages.ir.lossy import GradientError, Lossy
from stowage.stages.ir.trace import TraceTables
from stowage.stages.optimizers import Bench, KnownOptimizer
from stowage.stages.profile import CostStore, Similar, estimated_costs
from stowage.stages.rewrite import variants_of
from stowage.stages.rewrite.lossy import allowed
from stowage.stages.runtime.sharding.agreement import NO_HINTS, agree
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.sensitivity import ErrorStore, StepTensors, gradient_errors
from stowage.stages.solve import Known, LowerTier, PlanRequest, Reserve, check_method, eager_peak_bytes
from stowage.stages.trace import MicroBatch, Recorded, RecordedForward, parameters_of, recorded_text, with_updates


@dataclass
class Planner:
    """Plans steps of one model: the first of each kind in full, others from what is known of other sizes if possible.

    The attributes that are not explained here are attributes of `Planning` and of `StepToPlan`.

    Attributes:
        budget: the device budget.
        structures: number of steps that are remembered at most.
        ranks: the processes that train the model together; rank 0 plans for all of them.
        freeze: what steps may freeze; None where nothing is ever frozen.
        watch: receives the progress.
        lossy: leave to keep values for backward in fewer bits.
    """

    model: nn.Module
    optimizer: KnownOptimizer | None
    budget: RunBudget
    method: str
    stores: Path
    effort: Effort
    lower_tier: LowerTier | None
    structures: int = 16
    ranks: Ranks | None = None
    freeze: Freezing | None = None
    watch: Watch = field(default_factory=Watch)
    lossy: Lossy | None = None

    def __post_init__(self) -> None:
        check_method(self.method)
        self._sizes = Sizes(self.structures)
        self._store = CostStore(self.stores / "costs")
        self._similar = Similar()
        self._kinds: set[MicroBatch] = set()
        self._buckets: dict[MicroBatch, int] = {}
        self._measured: tuple[Recorded, list[GradientError]] | None = None  # all micro-batches of a step have the same

    def training_step(
        self,
        recorded: Recorded,
        micro_batch: MicroBatch,
        largest: MicroBatch | None,
        offloaded_at_rest: frozenset[str],
        *,
        effort: Effort | None = None,
        in_full: bool = False,
        slow: Callable[[], None] = lambda: None,
        live: Callable[[], AbstractContextManager[list[StepTensors]]] | None = None,
    ) -> Planned:
        """Plan a training step.

        Args:
            recorded: see `StepToPlan`.
            micro_batch: see `StepToPlan`.
            largest: see `StepToPlan`.
            offloaded_at_rest: see `PlanRequest`.
            effort: replaces the planner's effort.
            in_full: measure and search, unless everything fits anyway.
            slow: called before anything is measured or searched in full.
            live: lends the tensors that the step reads, for each batch to measure on; needed where there is leave for
                lossy plans.

        Raises:
            StowageError: see the stages; `Infeasible` when the budget cannot be met.
        """

        def plan(micro_batch: MicroBatch) -> Planned:
            planned = None
            if micro_batch in self._kinds:
                planned = self._at_once(recorded, micro_batch, largest, offloaded_at_rest, in_full=in_full)
            if planned is None:
                slow()
                effort_now = effort or self.effort
                planned = self._in_full(recorded, micro_batch, largest, offloaded_at_rest, effort_now, live)
            return planned

        if self.ranks is not None:
            self.agree({"traced step": recorded_text(recorded)})
            rates = self._rates(self.ranks, self._device_type())  # among all ranks, before rank 0 plans alone
            known = self._buckets.get(micro_batch)
            sizes = (
                [known] if known is not None else bucket_sizes(rates, self.ranks.count, largest_block_bytes(self.model))
            )
            refused: StowageError | None = None
            with ExitStack() as stack:
                if self.lossy is not None and live is not None:
                    # Rank 0 measures on whole parameters, which all ranks make together.
                    live = _held(stack.enter_context(live()))
                try:
                    (found, self._buckets[micro_batch]), nbytes, said, freezable = self.ranks.from_first(
                        lambda: (
                            plan_by_buckets(plan, micro_batch, sizes, max(NEAR, (effort or self.effort).rules_suffice)),
                            self.budget.nbytes,
                            self.budget.said,
                            self.freeze.found if self.freeze is not None else None,
                        ),
                        "the plan of rank 0",
                    )
                except StowageError as error:  # all ranks have it, and cut their parameters again alike
                    refused = error
            if refused is not None:
                raise refused
            self.budget.adopt(nbytes, said)
            if self.freeze is not None:
                self.freeze.adopt(freezable)
        else:
            found = plan(micro_batch)
        self._kinds.add(micro_batch)
        return found

    def agree(self, facts: Mapping[str, str], hints: Mapping[str, str] = NO_HINTS) -> None:
        """Compare with the other ranks, where there are some, what this one is about to do; see `agree`.

        Raises:
            RankError: a rank is about to do something else.
        """
        if self.ranks is not None:
            agree(self.ranks, facts, hints)

    def in_buckets(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with the size of buckets that was chosen for it."""
        size = self._buckets.get(micro_batch)
        return micro_batch if size is None else replace(micro_batch, bucket_bytes=size)

    def _device_type(self) -> str:
        return next((p.device.type for p in self.model.parameters()), "cpu")

    def _rates(self, ranks: Ranks, device: str) -> CollectiveRates:
        return ranks.rates(torch.device(device), self.stores / "devices")

    def _target(self, device: str) -> DeviceDescription:
        """Return this machine's device, with the rates of collectives where there are several ranks."""
        found = target_device(device, self.stores)
        if self.ranks is None:
            return found
        rates = self._rates(self.ranks, device)
        return replace(
            found,
            collective_bytes_per_s=rates.bytes_per_s,
            collective_s=rates.start_s,
            collective_ranks=self.ranks.count,
        )

    def count(self, recorded: Recorded, micro_batch: MicroBatch) -> None:
        """Let a training step raise a budget that is a percentage.

        Raises:
            TableError: an operator does not run on this device.
        """
        trace = with_updates(recorded, self.model, optimizer=self.optimizer, micro_batch=micro_batch)
        target = self._target(trace.meta.device)
        costs = self._estimated([trace], recorded, target)
        self.budget.see(eager_peak_bytes(trace, self._sizes.nodes(trace, costs)[0]))

    def _estimated(
        self, traces: Iterable[TraceTables], recorded: Recorded, target: DeviceDescription
    ) -> dict[str, Cost]:
        named = parameters_of(self.model, recorded.outside)
        make_update = Bench(self.optimizer.optimizer, named) if self.optimizer is not None else None
        return estimated_costs(traces, target, self._store, self._similar, make_update)

    def _in_full(
        self,
        recorded: Recorded,
        micro_batch: MicroBatch,
        largest: MicroBatch | None,
        offloaded_at_rest: frozenset[str],
        effort: Effort,
        live: Callable[[], AbstractContextManager[list[StepTensors]]] | None,
    ) -> Planned:
        since_s = time.monotonic()
        step = StepToPlan(
            model=self.model,
            optimizer=self.optimizer,
            recorded=recorded,
            micro_batch=micro_batch,
            largest=largest,
            leave=self._leave(recorded, live),
        )
        how = self._how(effort, offloaded_at_rest)
        costed = cost_step(step, replace(how, target=self._target(self._device_type())))
        known = Known()
        plans = CurvePlanner(costed, how, known)
        budget_bytes = self.budget.see(costed.eager_peak_bytes, plans.sought)
        reserve = Reserve(costed.target, budget_bytes, costed.variants[0].trace, self.budget.said)
        kept = self._kept(costed, reserve, offloaded_at_rest)
        self._learn(costed, searched=kept is None)
        if kept is not None:
            return kept
        planned = plan_costed(costed, budget_bytes, how, said=self.budget.said, known=known, since_s=since_s)
        if self.freeze is None:
            self._sizes.learn_plan(costed.variants[0].trace, planned)
        return planned

    def _kept(self, costed: Costed, reserve: Reserve, offloaded_at_rest: frozenset[str]) -> Planned | None:
        """Return the plan that keeps everything, where it fits, so that nothing has to be searched; else None."""
        plain = costed.variants[0]
        freezable = self.freeze.freezable(plain.trace) if self.freeze is not None else None
        request = self._request(reserve.usable_bytes, costed.target, offloaded_at_rest)
        found = everything_kept(plain, request, freezable)
        if found is None:
            return None
        self.watch("codegen")
        return self._finished(found, reserve, costed.eager_peak_bytes)

    def _finished(self, found: AtOnce, reserve: Reserve, eager_peak_bytes: int) -> Planned:
        variant, stores, solved = found.variant, self.stores, reserve.stated(found.solved)
        nodes, blocks = list(variant.nodes), list(variant.blocks)
        return finish(variant.trace, nodes, blocks, found.options, solved, stores, eager_peak_bytes)

    def _leave(
        self, recorded: Recorded, live: Callable[[], AbstractContextManager[list[StepTensors]]] | None
    ) -> Leave | None:
        if self.lossy is None or live is None:
            return None

        def errors(trace: TraceTables, lossy: Lossy) -> list[GradientError]:
            del trace  # measured without what a micro-batch or a rank adds, which makes no error larger
            if self._measured is None or self._measured[0] is not recorded:
                plain = with_updates(recorded, self.model, micro_batch=MicroBatch())
                kinds = allowed(lossy.kinds, freezes=self.freeze is not None)
                with live() as tensors:
                    store = ErrorStore(self.stores / "errors")
                    key = store.key(plain, kinds, tensors)
                    found = store.find(key)
                    if found is None:
                        found = gradient_errors(plain, kinds, tensors, progress=self.watch.part)
                        store.add(key, found)
                    self._measured = recorded, found
            return self._measured[1]

        return Leave(self.lossy, errors)

    def _how(self, effort: Effort, offloaded_at_rest: frozenset[str]) -> Planning:
        return Planning(
            stores=self.stores,
            effort=effort,
            progress=self.watch,
            profiled=self.watch.part,
            method=self.method,
            lower_tier=self.lower_tier,
            offloaded_at_rest=offloaded_at_rest,
            part=self.watch.part,
            freeze=self.freeze,
            lossy=self.lossy is not None,
        )

    def _request(self, budget_bytes: int, target: DeviceDescription, offloaded_at_rest: frozenset[str]) -> PlanRequest:
        return self._how(self.effort, offloaded_at_rest).request(budget_bytes, target)

    def _learn(self, costed: Costed, *, searched: bool) -> None:
        costs = {c.signature: c for c in costed.costs}
        for variant in costed.variants:
            self._similar.learn(variant.trace, costs)
        self._sizes.learn(costed, searched=searched)

    def _at_once(
        self,
        recorded: Recorded,
        micro_batch: MicroBatch,
        largest: MicroBatch | None,
        offloaded_at_rest: frozenset[str],
        *,
        in_full: bool,
    ) -> Planned | None:
        """Return a plan made without measuring times, if there is one."""
        trace = with_updates(recorded, self.model, optimizer=self.optimizer, micro_batch=micro_batch)
        whole = trace
        if largest is not None:
            whole = with_updates(recorded, self.model, optimizer=self.optimizer, micro_batch=largest)
        target = self._target(trace.meta.device)
        self.watch("profile")
        traces = {**variants_of(trace), "whole": whole}
        try:
            costs = self._estimated(traces.values(), recorded, target)
        except TableError:  # measuring in full may succeed, or says what is wrong
            return None
        if self.freeze is not None:
            costs = {c.signature: c for c in self.freeze.with_copies(costs.values(), traces.values())}
        self.watch("partition")
        nodes, blocks = self._sizes.nodes(trace, costs)
        eager = eager_peak_bytes(whole, nodes if whole is trace else self._sizes.nodes(whole, costs)[0])
        if self.budget.must_search(eager):
            return None
        reserve = Reserve(target, self.budget.see(eager), trace, self.budget.said)
        request = self._request(reserve.usable_bytes, target, offloaded_at_rest)
        self.watch("solve")
        freezable = self.freeze.freezable(trace) if self.freeze is not None else None
        found = self._sizes.plan(
            trace, nodes, blocks, costs, request, self.stores, self.effort, only_kept=in_full, freezable=freezable
        )
        if found is None:
            return None
        self.watch("codegen")
        planned = self._finished(found, reserve, eager)
        if self.freeze is None:
            self._sizes.learn_plan(trace, planned)
        return planned

    def forward(self, recorded: RecordedForward, resting: Resting) -> Planned:
        """Plan a forward alone; see `plan_forward`."""
        self.watch("profile")

        def plan() -> Planned:
            return plan_forward(
                self.model,
                recorded,
                resting,
                stores=self.stores,
                effort=self.effort,
                lower_tier=self.lower_tier,
                similar=self._similar,
                profiled=self.watch.part,
                target=self._target(self._device_type()),
                ranks=self.ranks.count if self.ranks is not None else 1,
            )

        if self.ranks is None:
            return plan()
        self.agree({"traced forward": recorded_text(recorded)})
        self._rates(self.ranks, self._device_type())
        return self.ranks.from_first(plan, "the plan of rank 0")


def _held(tensors: list[StepTensors]) -> Callable[[], AbstractContextManager[list[StepTensors]]]:
    """Return what lends tensors that are lent already."""
    return lambda: nullcontext(tensors)
