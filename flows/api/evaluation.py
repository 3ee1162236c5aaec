"""Evaluation within the budget: forward-only plans of a model, made when a batch of a new form first appears."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from stowage.flows.api.binding import Binding
from stowage.flows.api.check.shadow import Net
from stowage.flows.api.interrupt import ends_in_one_line
from stowage.flows.api.reasons import form_of, planned_text, tensors_text, why
from stowage.flows.api.recent import Recent
from stowage.flows.planning.effort import Effort, target_device
from stowage.flows.planning.planned import Planned, finish
from stowage.flows.planning.progress import Watch
from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import Infeasible, StaleStep
from stowage.stages.ir.trace import Storage
from stowage.stages.partition.forward import forward_nodes
from stowage.stages.profile import CostStore, Similar, estimated_costs, profile_trace, times_are_known
from stowage.stages.runtime import Program
from stowage.stages.runtime.program import forget_source
from stowage.stages.runtime.sharding.agreement import CALL, NO_HINTS, heard, together
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.solve import LowerTier
from stowage.stages.solve.evaluation import solve_forward
from stowage.stages.solve.reserve import Reserve
from stowage.stages.structure.generators import forked_generators
from stowage.stages.trace.forward import Forward, RecordedForward, forward_tables, record_forward
from stowage.stages.workload import BatchSignature, batch_signature, model_signature
from stowage.stages.workload.autocast import without_autocast

_AWAY = ("offloaded", "updating")
"""States of a slot, between iterations, in which its tensor is not on the device."""


@dataclass(frozen=True)
class Resting:
    """Placement of a model's tensors between training iterations.

    Attributes:
        budget_bytes: the device budget.
        offloaded_at_rest: names of parameters and states (`parameter::state`) that are offloaded.
        beside: storages that a forward does not use: optimizer states, and gradients that wait.
        tier_in_use: the training plan uses a lower tier.
    """

    budget_bytes: int
    offloaded_at_rest: frozenset[str]
    beside: tuple[Storage, ...]
    tier_in_use: bool

    @staticmethod
    def of(planned: Planned, model: nn.Module, budget_bytes: int) -> Resting:
        """Return the placement under the latest training plan, with the budget of the run."""
        waiting = [
            Storage(0, p.grad.untyped_storage().nbytes(), "gradient", name)
            for name, p in model.named_parameters()
            if p.grad is not None
        ]
        return Resting(
            budget_bytes,
            frozenset(s.name for s in planned.slots if s.role != "temporary" and s.start in _AWAY),
            (*(replace(s, storage=0) for s in planned.trace.storages if s.role == "state"), *waiting),
            bool(planned.slots),
        )


def plan_forward(
    model: nn.Module,
    recorded: RecordedForward,
    resting: Resting,
    *,
    stores: Path,
    effort: Effort,
    lower_tier: LowerTier | None,
    similar: Similar | None = None,
    profiled: Callable[[int, int], None] = lambda done, total: None,
    target: DeviceDescription | None = None,
    ranks: int = 1,
) -> Planned:
    """Plan a forward alone: profile, partition, solve, codegen.

    Args:
        model: the model that runs.
        recorded: its forward, traced.
        resting: what is in memory besides.
        stores: folder of measured costs, options and plans.
        effort: limits on measuring and searching.
        lower_tier: the lower tier that the plan may use, or None.
        similar: knows the costs of calls in other sizes. Without a lower tier no decision depends on times: those of
            calls that were never measured are then estimated too.
        profiled: see `profile_trace`.
        target: the device, by default this machine's as it was measured.
        ranks: number of ranks that hold a shard of each parameter.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    trace = forward_tables(recorded, model, resting.beside, ranks=ranks)
    target = target or target_device(trace.meta.device, stores)
    store = CostStore(stores / "costs")
    if similar is not None and (lower_tier is None or times_are_known(trace, target, store, similar)):
        costs = estimated_costs([trace], target, store, similar)
    else:
        measured = profile_trace(
            trace,
            target,
            store,
            seconds_per_call=effort.seconds_per_call,
            min_samples=effort.min_samples,
            progress=profiled,
        )
        costs = {c.signature: c for c in measured}
        if similar is not None:
            similar.learn(trace, costs)
    nodes = forward_nodes(trace, costs)
    reserve = Reserve(target, resting.budget_bytes, trace)
    offloaded_at_rest = frozenset(
        s.storage for s in trace.storages if s.name in resting.offloaded_at_rest and s.role in ("parameter", "state")
    )
    with reserve.counted():
        solved = reserve.stated(
            solve_forward(
                trace,
                nodes,
                device_budget_bytes=reserve.usable_bytes,
                lower_tier=lower_tier,
                offloaded_at_rest=offloaded_at_rest,
                tier_in_use=resting.tier_in_use,
                device=target.name,
                device_fingerprint=target.fingerprint,
            )
        )
    return finish(trace, nodes, [], [], solved, stores, solved.summary.keep_all_peak_bytes)


@dataclass(frozen=True)
class _Known:
    key: tuple[Any, ...]
    resting: Resting
    planned: Planned
    program: Program
    recorded: RecordedForward
    digest: str = ""

    def serves(self, key: tuple[Any, ...], resting: Resting) -> bool:
        """Return whether this plan is valid now; one for a smaller budget is valid too."""
        now = replace(resting, budget_bytes=self.resting.budget_bytes)
        stands = self.recorded.outside.differs() is None and self.recorded.left.stands()
        return stands and self.key == key and self.resting == now and self.resting.budget_bytes <= resting.budget_bytes


class Planning(Protocol):
    """Plans forwards.

    Attributes:
        watch: receives the progress.
        ranks: the processes that train together; None for one.
    """

    watch: Watch
    ranks: Ranks | None

    def agree(self, facts: Mapping[str, str], hints: Mapping[str, str] = NO_HINTS) -> None:
        """Compare with other ranks what this one is about to do."""

    def forward(self, recorded: RecordedForward, resting: Resting) -> Planned:
        """Plan a forward alone; see `plan_forward`."""


class Evaluations:
    """Evaluates one model under plans.

    Attributes:
        planned: the plan of the latest call; None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        planner: Planning,
        binding: Binding,
        net: Net,
        *,
        most: int,
        say: Callable[[str], None],
        touches: tuple[Any, ...] = (),
    ) -> None:
        """Take what evaluation needs: `binding` makes programs, `most` are kept; `touches`: see `record_forward`."""
        self._model = model
        self._planner = planner
        self._binding = binding
        self._net = net
        self._say = say
        self._touches = touches
        self._known = Recent[_Known](most)
        self._seen: dict[BatchSignature, None] = {}

    @property
    def planned(self) -> Planned | None:
        """Return the plan of the latest call; None before the first."""
        return self._known.latest.planned if self._known.latest is not None else None

    def forget(self) -> None:
        """Forget every plan."""
        self._known.forget(lambda known: True)

    def __call__(self, batch: Any, forward: Forward, resting: Resting) -> Any:
        """Run `forward(model, batch)` in evaluation mode without gradients, with `resting` before and after."""
        with evaluation_mode(self._model):
            known = self._find(batch, forward, resting)
            outputs: list[torch.Tensor] = []

            def work() -> list[torch.Tensor]:
                outputs[:] = known.program.forward(batch)
                return outputs[: known.recorded.returns]

            try:
                tensors = self._net.run_forward(known.program, known.planned, batch, forward, work)
            except StaleStep:
                self._known.forget(lambda other: other is known)
                raise
            known.recorded.left.check(outputs[known.recorded.returns :])
            known.recorded.left.apply(outputs[known.recorded.returns :])
            return known.recorded.form.fill(tensors)

    def prepare(self, batch: Any, forward: Forward, resting: Resting) -> None:
        """Plan the forward that `__call__` would run."""
        with evaluation_mode(self._model):
            self._find(batch, forward, resting)

    def _find(self, batch: Any, forward: Forward, resting: Resting) -> _Known:
        with heard(self._planner.ranks):
            key = (forward, batch_signature(batch), model_signature(self._model))
            stands = not self._binding.changes()
            known = self._known.find(lambda known: stands and known.serves(key, resting))
        self._planner.agree(
            {
                CALL: "step.evaluate",
                "batch to evaluate": form_of(key[1]),
                "tensor in the batch to evaluate": tensors_text(key[1]),
                "plan of an evaluation": known.digest if known is not None else "none yet",
            }
        )
        if known is not None:
            return known
        known = self._make(key, batch, forward, resting)
        self._seen.setdefault(key[1])
        for dropped in self._known.add(known):
            forget_source(str(dropped.planned.folder / "step.py"))
        return known

    def _make(self, key: tuple[Any, ...], batch: Any, forward: Forward, resting: Resting) -> _Known:
        began = time.perf_counter()
        _, form, mode = key
        reason = "evaluation, " + why(form, mode, None, [k.key[1:] for k in self._known], self._seen)
        watch = self._planner.watch

        def plan() -> tuple[RecordedForward, Planned]:
            watch("trace")
            with heard(self._planner.ranks), self._binding.tracing():
                recorded = record_forward(self._model, batch, forward, self._binding.layouts(), self._touches)
            for notice in recorded.notices:
                self._say(notice)
            with without_autocast():
                return recorded, self._planner.forward(recorded, resting)

        with ends_in_one_line(watch, self._say), watch.shown(reason), forked_generators():
            try:
                recorded, planned = with_true_kernels(plan)
            except Infeasible as error:
                raise error.about("evaluation", form_of(form)) from None
        digest = planned.digest() if self._planner.ranks is not None else ""
        self._planner.agree({"plan of an evaluation": digest, **self._binding.changes()})
        program = together(self._planner.ranks, lambda: self._binding.bind(planned, recorded.outside, trains=False))
        self._say(planned_text(planned.summary, time.perf_counter() - began, reason))
        return _Known(key, resting, planned, program, recorded, digest)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation mode; afterwards every module is in its former mode."""
    modes = {module: module.training for module in model.modules()}
    if not any(modes.values()):
        yield
        return
    model.eval()
    try:
        yield
    finally:
        if modes[model]:
            model.train()
        for module, training in modes.items():
            module.training = training
