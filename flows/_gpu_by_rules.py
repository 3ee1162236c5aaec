"""Plans without a solver: a job's step is traced, scheduled by simple rules and judged by the referee.

A machine with a GPU need not have what planning needs. These plans are legal, and use every verb of the runtime; they
are not fast.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.flows._gpu_job import Job, build_shell, first_weights
from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.device.tiers import Tier
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, Link, TierState
from stowage.stages.ir.plan import PlanSummary, Slot
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import left_behind
from stowage.stages.partition.fold import fold
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.runtime.program import Program
from stowage.stages.simulate.plan import Outcome, Step, replay_plan
from stowage.stages.simulate.together import put_off
from stowage.stages.trace import MicroBatch, record_step, with_updates

MOVABLE_BYTES = 4096
"""Parameters and states of so many bytes move."""

PLENTY_BYTES = 1 << 50

CALL_S = 1e-3
"""Of a call whose time is not known: the referee's times are of no use then, and its bytes are."""


@dataclass(frozen=True)
class RulePlan:
    """Actions in order, and where storages are between iterations."""

    steps: list[Step]
    slots: list[Slot]
    start: TierState = EVERYTHING_ON_DEVICE


class Traced:
    """A job's step as tables and compute nodes: forward, backward, then updates.

    Attributes:
        job: what was traced, on tensors without memory.
        trace, nodes: the tables.
    """

    def __init__(
        self,
        job: Job,
        *,
        max_grad_norm: float | None = None,
        times_s: Mapping[str, float] | None = None,
        movable_bytes: int = MOVABLE_BYTES,
    ) -> None:
        """Trace.

        Args:
            job: the configuration.
            max_grad_norm: of clipping.
            times_s: of calls, by signature.
            movable_bytes: see `MOVABLE_BYTES`.

        Raises:
            TraceError: the model cannot be traced.
        """
        self.job = job
        model, layouts = build_shell(job)
        recorded = record_step(model, job.batch(0), layouts=layouts)
        self.trace: TraceTables = with_updates(
            recorded,
            model,
            optimizer=job.make_optimizer(model.parameters()),
            micro_batch=MicroBatch(max_grad_norm=max_grad_norm),
            label=job.name(),
        )
        known = times_s or {}
        costs = {
            c.signature: Cost(c.signature, "", known.get(c.signature, CALL_S), 0, 0, 1, "measured")
            for c in self.trace.calls
        }
        order = sorted(fold(self.trace, costs).nodes, key=lambda n: (n.phase == "update", n.node))
        self.nodes: list[ComputeNode] = [dataclasses.replace(n, node=i) for i, n in enumerate(order)]
        storages = self.trace.storages
        self._keep = frozenset(self.trace.values[v].storage for v in left_behind(self.trace))
        self._temporary = {s.storage for s in storages if s.role == "temporary"}
        self._maker = {s: n for n in self.nodes for s in n.creates}
        self._movable = {s.storage for s in storages if s.role in ("parameter", "state") and s.nbytes >= movable_bytes}

    def keep_all(self) -> RulePlan:
        """Every node once, everything on the device."""
        return RulePlan(self._with_frees(range(len(self.nodes))), [])

    def recompute_all(self) -> RulePlan:
        """What forward made is dropped before backward and made again, node by node, where backward reads it."""
        forward = [n.node for n in self.nodes if n.phase == "forward"]
        here = set(self._keep) | {s for n in self.nodes if n.once for s in n.creates}
        found = list(forward)
        for node in self.nodes[len(forward) :]:
            self._bring(node.reads, here, found)
            here.update(node.creates)
            found.append(node.node)
        return RulePlan(self._with_frees(found), [])

    def stream_all(self, *, ahead: int = 3, lag: int = 2, below: bool = False) -> RulePlan:
        """Every movable storage lives below, comes `ahead` nodes before its use, and is freed `lag` nodes after it.

        Args:
            ahead, lag: in nodes.
            below: parameters are updated by the CPU.
        """
        on_cpu: dict[int, int] = {}
        for node in self.nodes if below else ():
            parameter = self._updated(node)
            if parameter in self._movable:
                on_cpu[node.node] = parameter
        before: dict[int, list[Step]] = defaultdict(list)
        after: dict[int, list[Step]] = defaultdict(list)
        last = len(self.nodes) - 1
        for storage, places in self._uses(on_cpu):
            free_from = 0
            for first, end in _stretches(places, ahead + lag + 2):
                before[max(free_from, first - ahead)].append(Step(-1, storage, "up", "reload"))
                before[first].append(Step(-1, storage, "up", "wait"))
                leave = min(end + lag, last)
                if any(storage in self.nodes[n].mutates for n in range(first, end + 1) if n not in on_cpu):
                    after[end].append(Step(-1, storage, "down", "offload"))
                    after[leave].append(Step(-1, storage, "down", "wait"))
                after[leave].append(Step(-1, storage, "down"))
                free_from = leave + 1
        steps, gone = self._woven(before, after, on_cpu)
        return RulePlan(steps, self._slots(gone), _below(self._movable))

    def together(self, plan: RulePlan, budget_bytes: int = PLENTY_BYTES) -> RulePlan:
        """The same with updates in as few calls of the optimizer as the budget has room for."""
        rows = self.judge(plan).rows
        return dataclasses.replace(plan, steps=put_off(self.trace, self.nodes, rows, budget_bytes))

    def judge(self, plan: RulePlan) -> Outcome:
        """The referee's verdict.

        Raises:
            IllegalPlanError: the rules made a plan that is none.
        """
        return replay_plan(
            self.trace.storages,
            self.nodes,
            plan.steps,
            keep=self._keep,
            link=Link(1e10, 1e10, 1.5e10),
            start=plan.start,
            cpu_update_s={n.node: CALL_S for n in self.nodes if n.phase == "update"},
        )

    def source_of(self, plan: RulePlan) -> str:
        """Generated code, if the referee agrees."""
        return emit_step(self.trace, self.nodes, self.judge(plan).rows, _summary(), plan.slots)

    def _bring(self, storages: Iterable[int], here: set[int], found: list[int]) -> None:
        """Make what is not there again, and before it what that is made from. Chains are longer than Python's stack."""
        waiting: list[tuple[int, bool]] = [(s, False) for s in reversed([*storages])]
        while waiting:
            storage, ready = waiting.pop()
            if storage not in self._temporary or storage in here:
                continue
            maker = self._maker[storage]
            if ready:
                here.update(maker.creates)
                found.append(maker.node)
            else:
                waiting.append((storage, True))
                waiting += [(s, False) for s in reversed([*maker.reads])]

    def _with_frees(self, executions: Sequence[int]) -> list[Step]:
        """Each copy of a temporary storage is freed after its last use."""
        last: dict[tuple[int, int], int] = {}
        copy: dict[int, int] = {}
        for place, number in enumerate(executions):
            node = self.nodes[number]
            for storage in node.creates:
                copy[storage] = place
            for storage in self._temporary.intersection((*node.reads, *node.creates)):
                last[storage, copy[storage]] = place
        gone: dict[int, list[int]] = defaultdict(list)
        for (storage, made), place in last.items():
            if storage not in self._keep or copy[storage] != made:
                gone[place].append(storage)
        found: list[Step] = []
        for place, number in enumerate(executions):
            phase = self.nodes[number].phase
            found.append(Step(number, -1, phase))
            found += [Step(-1, storage, phase) for storage in sorted(gone[place])]
        return found

    def _uses(self, on_cpu: Mapping[int, int]) -> list[tuple[int, list[int]]]:
        """Movable storages with the nodes that touch them on the device."""
        uses: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes:
            if node.node not in on_cpu:
                for storage in self._movable.intersection((*node.reads, *node.mutates)):
                    uses[storage].append(node.node)
        return sorted(uses.items())

    def _updated(self, node: ComputeNode) -> int:
        """The parameter of an update, -1 for other nodes."""
        if node.phase != "update":
            return -1
        return next((s for s in node.mutates if self.trace.storages[s].role == "parameter"), -1)

    def _woven(
        self, before: Mapping[int, list[Step]], after: Mapping[int, list[Step]], on_cpu: Mapping[int, int]
    ) -> tuple[list[Step], set[int]]:
        """Copies among the computations; and temporary storages that go down for the CPU's updates."""
        gone: set[int] = set()
        steps: list[Step] = []
        for step in self._with_frees(range(len(self.nodes))):
            if step.node < 0:
                steps.append(step)
                continue
            steps += before.get(step.node, [])
            if step.node in on_cpu:
                for storage in self.nodes[step.node].reads:
                    if storage in self._temporary and storage not in gone:  # the scale of clipping serves several
                        steps += [Step(-1, storage, "below", "offload"), Step(-1, storage, "below", "wait")]
                        gone.add(storage)
                steps.append(Step(step.node, on_cpu[step.node], "below", "update"))
            else:
                steps.append(step)
            steps += after.get(step.node, [])
        return steps + [Step(-1, parameter, "below", "wait") for parameter in on_cpu.values()], gone

    def _slots(self, gone: Iterable[int]) -> list[Slot]:
        names: dict[int, str] = {}
        for value in self.trace.values:
            names.setdefault(value.storage, value.name)
        storages = self.trace.storages
        away = [Slot(s, storages[s].name, storages[s].nbytes, storages[s].role, "below", True) for s in self._movable]
        away.sort(key=lambda slot: slot.storage)
        return away + [Slot(g, names[g], storages[g].nbytes, "temporary", "device", False) for g in sorted(gone)]


class ByRules:
    """A job's model trained under such a plan; weights go where the plan has them, one after the other."""

    def __init__(self, traced: Traced, plan: RulePlan, tier: Tier | None = None) -> None:
        """`tier`: where slots are; the caller closes it."""
        job = traced.job
        self.model, layouts = build_shell(job)
        self.optimizer = job.make_optimizer(self.model.parameters())
        self.offloading = Offloading(tier, self.model, self.optimizer) if tier is not None else None
        if self.offloading is not None:
            self.offloading.populate(first_weights(job, layouts), plan.slots)
        else:
            parameters = dict(self.model.named_parameters())
            for name, tensor in first_weights(job, layouts):
                parameters[name].data = tensor
        source = traced.source_of(plan)
        known = manifest_of(source, "by rules", "").source_hash
        self.program: Program = bind(
            source,
            known,
            f"by_rules_{known[:8]}.py",
            traced.trace,
            self.model,
            self.optimizer,
            plan.slots,
            self.offloading,
        )

    def __call__(self, batch: Any) -> torch.Tensor:
        """One iteration."""
        return self.program(batch)

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, copied to host memory; everything is on the device afterwards."""
        if self.offloading is not None:
            self.offloading.fetch_all()
        return weights_of(self.model)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies in host memory, by name."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}


def _below(storages: Iterable[int]) -> TierState:
    away = frozenset(storages)
    return TierState(below=away, copied=away)


def _stretches(places: Sequence[int], gap: int) -> list[tuple[int, int]]:
    """Uses that are so close that the storage stays in between."""
    found = [(places[0], places[0])]
    for place in places[1:]:
        first, end = found[-1]
        if place - end <= gap:
            found[-1] = (first, place)
        else:
            found.append((place, place))
    return found


def _summary() -> PlanSummary:
    blank = {"int": 0, "float": 0.0, "str": ""}
    fields = {f.name: blank[str(f.type)] for f in dataclasses.fields(PlanSummary)}
    return PlanSummary(**{**fields, "variant": "plain"})  # type: ignore[arg-type]
