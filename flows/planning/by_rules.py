"""Plans without a solver: a step's tables, scheduled by simple rules, judged by the referee, written as code and bound.

Like the benchmark of a machine with a GPU, this imports with torch, transformers, pyarrow and safetensors alone. The
plans are legal, and use every verb of the runtime; they are not fast.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, Link, TierState
from stowage.stages.ir.plan import PlanSummary, Slot
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import Unit
from stowage.stages.ir.updates import left_behind, pinned, taken_gradients
from stowage.stages.partition.fold import fold
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.executors.base import ExecutablePlan
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.program import Program
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.simulate.plan import Outcome, replay_plan
from stowage.stages.simulate.slots import slots_of
from stowage.stages.simulate.together import put_off

MOVABLE_BYTES = 4096
"""Size from which parameters, states and gradients are offloaded."""

PLENTY_BYTES = 1 << 50
"""A budget that every plan fits."""

CALL_S = 1e-3
"""Time of a call that was not measured: the referee's times are then meaningless, and its bytes are right."""

LINK = Link(1e10, 1e10, 1.5e10)  # rates of transfers for the referee; they decide nothing


@dataclass(frozen=True)
class RulePlan:
    """Actions in order, and the placement of storages between iterations."""

    steps: list[Step]
    slots: list[Slot]
    start: TierState = EVERYTHING_ON_DEVICE


@dataclass
class Woven:
    """Actions before and after each node, by its number, and after all of them."""

    before: dict[int, list[Step]] = field(default_factory=lambda: defaultdict(list))
    after: dict[int, list[Step]] = field(default_factory=lambda: defaultdict(list))
    last: list[Step] = field(default_factory=list)


class Rules:
    """Tables and compute nodes, and their schedules: forward, backward, then updates; or a forward alone.

    Attributes:
        trace: the tables.
        units: groups of parameters that a step may freeze.
        nodes: nodes with costs; without measured ones each call takes `CALL_S` and no workspace.
        spent: gradients that wait from the micro-batch before, and that an update takes.
        keep: storages that outlive the iteration though they may be freed.
        temporary: storages that the plan frees: activations, gradients, and those that are spent.
        movable: parameters, states and waiting gradients of `movable_bytes` or more that may be offloaded.
    """

    def __init__(
        self,
        trace: TraceTables,
        costs: Mapping[str, Cost] | None = None,
        *,
        movable_bytes: int = MOVABLE_BYTES,
        units: Sequence[Unit] = (),
    ) -> None:
        """Make the nodes.

        Args:
            trace: the tables.
            costs: costs of calls, by signature.
            movable_bytes: see `MOVABLE_BYTES`.
            units: groups of parameters that a step may freeze.
        """
        self.trace = trace
        self.units = list(units)
        known = costs or {c.signature: Cost(c.signature, "", CALL_S, 0, 0, 1, "measured") for c in trace.calls}
        order = sorted(fold(trace, known).nodes, key=lambda n: (n.phase == "update", n.node))
        self.nodes: list[ComputeNode] = [dataclasses.replace(n, node=i) for i, n in enumerate(order)]
        storage_of = [v.storage for v in trace.values]
        waiting = {s.storage for s in trace.storages if s.role == "gradient"}
        self.spent = waiting.intersection(storage_of[v] for v in taken_gradients(trace.calls))
        self.keep = frozenset(storage_of[v] for v in left_behind(trace)) | (waiting - self.spent)
        self.temporary = {s.storage for s in trace.storages if s.role == "temporary"} | self.spent
        large = {s.storage for s in trace.storages if s.nbytes >= movable_bytes}
        lasting = {s.storage for s in trace.storages if s.role in ("parameter", "state", "gradient")}
        self.movable = (lasting & large) - pinned(trace)
        self._stay = self._staying() & large
        self._maker = {s: n for n in self.nodes for s in n.creates}

    def keep_all(self) -> RulePlan:
        """Run every node once, with everything on the device."""
        return RulePlan(self.with_frees(range(len(self.nodes))), [])

    def recompute_all(self) -> RulePlan:
        """Free what forward made before backward, and make it again, node by node, where backward reads it."""
        forward = [n.node for n in self.nodes if n.phase == "forward"]
        here = set(self.keep) | {s for n in self.nodes if n.once for s in n.creates}
        found = list(forward)
        for node in self.nodes[len(forward) :]:
            self._make_again(node.reads, here, found)
            here.update(node.creates)
            found.append(node.node)
        return RulePlan(self.with_frees(found), [])

    def stream_all(self, *, ahead: int = 3, lag: int = 2, cpu_updates: bool = False) -> RulePlan:
        """Offload every movable storage; reload it `ahead` nodes before its use, and free it `lag` nodes after it.

        Gradients that wait for the next micro-batch are offloaded as soon as they are complete.

        Args:
            ahead: number of nodes between a reload and the use.
            lag: number of nodes between a use and the release.
            cpu_updates: parameters are updated by the CPU.
        """
        on_cpu = {n.node: p for n in self.nodes if cpu_updates and (p := self.updated(n)) in self.movable}
        woven = Woven()
        for storage, places in self._uses(on_cpu):
            self._stream(storage, places, ahead, lag, on_cpu, woven)
        for storage in sorted(self._stay):
            made = max(n.node for n in self.nodes if storage in (*n.creates, *n.reads))
            woven.after[made] += [*_down(storage), Step(-1, storage, "lower tier")]
        woven.last += [Step(-1, parameter, "lower tier", "wait") for parameter in on_cpu.values()]
        steps = self._steps(woven, on_cpu)
        offloaded_at_rest = frozenset(self.movable)
        start = TierState(offloaded=offloaded_at_rest, copied=offloaded_at_rest)
        return RulePlan(steps, slots_of(self.trace, steps, start), start)

    def together(self, plan: RulePlan, budget_bytes: int = PLENTY_BYTES) -> RulePlan:
        """Return the same plan with updates in as few calls of the optimizer as the budget has room for."""
        rows = self.judge(plan).rows
        return dataclasses.replace(plan, steps=put_off(self.trace, self.nodes, rows, budget_bytes))

    def judge(self, plan: RulePlan) -> Outcome:
        """Return the referee's verdict.

        Raises:
            IllegalPlanError: the plan that the rules made is not legal.
        """
        return replay_plan(
            self.trace.storages,
            self.nodes,
            plan.steps,
            keep=self.keep,
            start=plan.start,
            tier=ReplayedTier(LINK, cpu_update_s={n.node: CALL_S for n in self.nodes if n.phase == "update"}),
        )

    def source_of(self, plan: RulePlan) -> str:
        """Generate the code, if the referee agrees."""
        return emit_step(self.trace, self.nodes, self.judge(plan).rows, blank_summary(), plan.slots, self.units)

    def program(
        self, plan: RulePlan, model: nn.Module, optimizer: torch.optim.Optimizer | None, offloading: Offloading | None
    ) -> Program:
        """Generate the code, and bind it to a model."""
        found = self.executable(plan)
        known, path = found.manifest.source_hash, str(found.path)
        names = [unit.name for unit in self.units]
        return bind(found.source, known, path, self.trace, model, optimizer, plan.slots, offloading, units=names)

    def executable(self, plan: RulePlan) -> ExecutablePlan:
        """Generate the code, for an executor to bind."""
        source = self.source_of(plan)
        manifest = manifest_of(source, "by rules", "")
        path = Path(f"by_rules_{manifest.source_hash[:8]}.py")
        return ExecutablePlan(source, manifest, path, self.trace, plan.slots, units=self.units)

    def with_frees(self, executions: Sequence[int]) -> list[Step]:
        """Return nodes in this order, and free each copy of a temporary storage after its last use."""
        last: dict[tuple[int, int], int] = {}
        copy: dict[int, int] = {}
        for place, number in enumerate(executions):
            node = self.nodes[number]
            for storage in node.creates:
                copy[storage] = place
            for storage in self.temporary.intersection((*node.reads, *node.creates)):
                last[storage, copy.get(storage, -1)] = place
        offloaded: dict[int, list[int]] = defaultdict(list)
        for (storage, made), place in last.items():
            if storage not in self.keep or copy[storage] != made:
                offloaded[place].append(storage)
        found: list[Step] = []
        for place, number in enumerate(executions):
            phase = self.nodes[number].phase
            found.append(Step(number, -1, phase))
            found += [Step(-1, storage, phase) for storage in sorted(offloaded[place])]
        return found

    def updated(self, node: ComputeNode) -> int:
        """Return the parameter of an update, -1 for other nodes."""
        if node.phase != "update":
            return -1
        return next((s for s in node.mutates if self.trace.storages[s].role == "parameter"), -1)

    def _staying(self) -> set[int]:
        """Return gradients made here that stay and may be offloaded at once: not those that the clip scales."""
        behind = left_behind(self.trace)
        if any(v in behind for c in self.trace.calls if c.phase == "update" for v in c.returns):
            return set()
        values = [g.gradient_value for g in self.trace.gradients if g.gradient_value in behind]
        return {self.trace.values[v].storage for v in values}

    def _make_again(self, storages: Iterable[int], here: set[int], found: list[int]) -> None:
        """Make missing storages again, and before each what it is made from; without recursion, for long chains."""
        waiting: list[tuple[int, bool]] = [(s, False) for s in reversed([*storages])]
        while waiting:
            storage, ready = waiting.pop()
            if storage not in self._maker or storage in here:
                continue
            maker = self._maker[storage]
            if ready:
                here.update(maker.creates)
                found.append(maker.node)
            else:
                waiting.append((storage, True))
                waiting += [(s, False) for s in reversed([*maker.reads])]

    def _uses(self, on_cpu: Mapping[int, int]) -> list[tuple[int, list[int]]]:
        """Return movable storages with the nodes that use them on the device."""
        uses: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes:
            if node.node not in on_cpu:
                for storage in self.movable.intersection((*node.reads, *node.mutates)):
                    uses[storage].append(node.node)
        return sorted(uses.items())

    def _stream(
        self, storage: int, places: Sequence[int], ahead: int, lag: int, on_cpu: Mapping[int, int], woven: Woven
    ) -> None:
        """Reload before each stretch of uses, offload after it; what an update here takes is not offloaded again."""
        free_from = 0
        found = stretches(places, ahead + lag + 2)
        read_by_cpu = any(storage in self.nodes[n].reads for n in on_cpu)
        for first, end in found:
            woven.before[max(free_from, first - ahead)].append(Step(-1, storage, "up", "reload"))
            woven.before[first].append(Step(-1, storage, "up", "wait"))
            taken = storage in self.spent and end == places[-1] and not read_by_cpu
            leave = end if taken else min(end + lag, len(self.nodes) - 1)
            changed = any(storage in self.nodes[n].mutates for n in range(first, end + 1) if n not in on_cpu)
            if changed and not taken:
                woven.after[end].append(Step(-1, storage, "down", "offload"))
                woven.after[leave].append(Step(-1, storage, "down", "wait"))
            woven.after[leave].append(Step(-1, storage, "down"))
            free_from = leave + 1

    def _steps(self, woven: Woven, on_cpu: Mapping[int, int]) -> list[Step]:
        """Place copies among the computations; what is made here and read by CPU updates is offloaded before them."""
        offloaded: set[int] = set()
        steps: list[Step] = []
        for step in self.with_frees(range(len(self.nodes))):
            if step.node < 0:
                if step.storage not in self.movable:
                    steps.append(step)
                continue
            steps += woven.before[step.node]
            if step.node in on_cpu:
                for storage in self.nodes[step.node].reads:
                    if storage in self._maker and storage not in offloaded:  # several updates read the clip scale
                        steps += _down(storage)
                        offloaded.add(storage)
                steps.append(Step(step.node, on_cpu[step.node], "lower tier", "update"))
            else:
                steps.append(step)
            steps += woven.after[step.node]
        return steps + woven.last


def _down(storage: int) -> list[Step]:
    return [Step(-1, storage, "lower tier", "offload"), Step(-1, storage, "lower tier", "wait")]


def stretches(places: Sequence[int], gap: int) -> list[tuple[int, int]]:
    """Return first and last of uses that are so close that the storage stays in between."""
    found = [(places[0], places[0])]
    for place in places[1:]:
        first, end = found[-1]
        if place - end <= gap:
            found[-1] = (first, place)
        else:
            found.append((place, place))
    return found


def blank_summary() -> PlanSummary:
    """Return the summary of a plan that states nothing about itself."""
    blank = {"int": 0, "float": 0.0, "str": "", "bool": True, "tuple[str, ...]": ()}
    fields = {f.name: blank[str(f.type)] for f in dataclasses.fields(PlanSummary)}
    return PlanSummary(**{**fields, "variant": "plain"})  # type: ignore[arg-type]
