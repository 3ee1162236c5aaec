"""Plans without a solver: a trace, scheduled by simple rules, judged by the referee, written as code and bound.

A machine with a GPU need not have what planning needs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, Link, TierState
from stowage.stages.ir.plan import PlanSummary, Slot
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import gradient_slot, left_behind, taken_gradients
from stowage.stages.partition.fold import fold
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.simulate.plan import Outcome, Step, replay_plan

MOVABLE = 4096
"""Bytes from which parameters, states and gradients that wait move."""


@dataclass(frozen=True)
class Plan:
    """Actions in order, and where storages are between iterations."""

    steps: list[Step]
    slots: list[Slot]
    start: TierState = EVERYTHING_ON_DEVICE


class Traced:
    """Tables and compute nodes: forward, backward, then updates; or a forward alone.

    Attributes:
        trace: the tables.
        nodes: with costs; without measured ones each call takes 1 ms and no workspace.
        keep: storages that outlive the iteration though they may be freed.
        temporary: storages that the plan frees: activations, and waiting gradients that an update takes.
        movable: parameters, states and waiting gradients from `MOVABLE` bytes on. Not what several parameters share,
            such as the one buffer that cuDNN wants the weights of recurrent layers in: no memory would be free before
            all of them have left.
    """

    def __init__(self, trace: TraceTables, costs: Mapping[str, Cost] | None = None) -> None:
        self.trace = trace
        known = costs or {c.signature: Cost(c.signature, "", 1e-3, 0, 0, 1, "measured") for c in trace.calls}
        folded: list[ComputeNode] = list(fold(trace, known).nodes)
        order = sorted(folded, key=lambda n: (n.phase == "update", n.node))
        self.nodes = [dataclasses.replace(n, node=i) for i, n in enumerate(order)]
        storage_of = [v.storage for v in trace.values]
        waiting = {s.storage for s in trace.storages if s.role == "gradient"}
        self.spent = waiting.intersection(storage_of[v] for v in taken_gradients(trace.calls))
        behind = left_behind(trace)
        self.keep = frozenset(storage_of[v] for v in behind) | (waiting - self.spent)
        self.stays = {storage_of[g.gradient_value]: g.parameter for g in trace.gradients if g.gradient_value in behind}
        self.temporary = {s.storage for s in trace.storages if s.role == "temporary"} | self.spent
        self.creator = {s: n for n in self.nodes for s in n.creates}
        roles = ("parameter", "state", "gradient")
        shared = Counter(v.storage for v in trace.values if v.source.startswith("parameter:"))
        self.movable = {
            s.storage for s in trace.storages if s.role in roles and s.nbytes >= MOVABLE and shared[s.storage] < 2
        }

    def with_frees(self, executions: Sequence[int]) -> list[Step]:
        """Each copy of a temporary storage is freed after its last use."""
        last: dict[tuple[int, int], int] = {}
        copy: dict[int, int] = dict.fromkeys(self.spent, -1)
        for place, number in enumerate(executions):
            node = self.nodes[number]
            for storage in node.creates:
                copy[storage] = place
            for storage in self.temporary.intersection((*node.reads, *node.creates)):
                last[storage, copy[storage]] = place
        gone: dict[int, list[int]] = defaultdict(list)
        for (storage, made), place in last.items():
            if not (storage in self.keep and copy[storage] == made):
                gone[place].append(storage)
        found: list[Step] = []
        for place, number in enumerate(executions):
            found.append(Step(number, -1, self.nodes[number].phase))
            found += [Step(-1, storage, self.nodes[number].phase) for storage in sorted(gone[place])]
        return found

    def keep_all(self) -> Plan:
        """Every node once."""
        return Plan(self.with_frees(range(len(self.nodes))), [])

    def recompute_all(self) -> Plan:
        """What forward made is dropped before backward and made again, node by node, where backward reads it."""
        forward = [n.node for n in self.nodes if n.phase == "forward"]
        here = set(self.keep) | {s for n in self.nodes if n.once for s in n.creates}
        found = list(forward)

        def bring(storages: Iterable[int]) -> None:
            for storage in storages:
                if storage in self.creator and storage not in here:
                    maker = self.creator[storage]
                    bring(maker.reads)
                    here.update(maker.creates)
                    found.append(maker.node)

        for node in self.nodes[len(forward) :]:
            bring(node.reads)
            here.update(node.creates)
            found.append(node.node)
        return Plan(self.with_frees(found), [])

    def stream_all(self, *, ahead: int = 3, lag: int = 2, below: bool = False) -> Plan:
        """Every movable storage lives below, comes `ahead` nodes before its use, and is freed `lag` nodes after it.
        Gradients that stay go down as soon as they are complete, if they are movable.

        Args:
            ahead, lag: in nodes.
            below: parameters are updated by the CPU.
        """
        on_cpu = {n.node: self._updated(n) for n in self.nodes if below and self._updated(n) in self.movable}
        before: dict[int, list[Step]] = defaultdict(list)
        after: dict[int, list[Step]] = defaultdict(list)
        for storage, places in sorted(self._uses(on_cpu).items()):
            self._bring(storage, places, ahead, lag, on_cpu, before, after)
        down = {s: p for s, p in self.stays.items() if self.trace.storages[s].nbytes >= MOVABLE and not self._clips()}
        for storage in sorted(down):
            made = max(n.node for n in self.nodes if storage in (*n.creates, *n.reads))
            after[made] += self._down(storage)
        plain = [
            s for s in self.with_frees(range(len(self.nodes))) if s.kind == "compute" or s.storage not in self.movable
        ]
        steps, gone = self._woven(plain, before, after, on_cpu)
        return self._placed(steps, gone, down)

    def _uses(self, on_cpu: Mapping[int, int]) -> dict[int, list[int]]:
        """Movable storage -> nodes of the device that use it, in order."""
        uses: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes:
            if node.node not in on_cpu:
                for storage in self.movable.intersection((*node.reads, *node.mutates)):
                    uses[storage].append(node.node)
        return uses

    def _bring(
        self,
        storage: int,
        places: Sequence[int],
        ahead: int,
        lag: int,
        on_cpu: Mapping[int, int],
        before: dict[int, list[Step]],
        after: dict[int, list[Step]],
    ) -> None:
        """Up before each stretch of uses, down after it."""
        last, free_from = len(self.nodes) - 1, 0
        stretches = _stretches(places, ahead + lag + 2)
        for number, (first, end) in enumerate(stretches):
            before[max(free_from, first - ahead)].append(Step(-1, storage, "up", "reload"))
            before[first].append(Step(-1, storage, "up", "wait"))
            changed = any(storage in self.nodes[n].mutates for n in range(first, end + 1) if n not in on_cpu)
            taken = storage in self.spent and number == len(stretches) - 1 and not self._taken_below(storage, on_cpu)
            leave = end if taken else min(end + lag, last)
            if changed and not taken:
                after[end].append(Step(-1, storage, "down", "offload"))
                after[leave].append(Step(-1, storage, "down", "wait"))
            after[leave].append(Step(-1, storage, "down"))
            free_from = leave + 1

    def _taken_below(self, gradient: int, on_cpu: Mapping[int, int]) -> bool:
        return any(gradient in self.nodes[n].reads for n in on_cpu)

    def _clips(self) -> bool:
        """Gradients that stay are scaled at the end: until then they are here."""
        return any(v in left_behind(self.trace) for c in self.trace.calls if c.phase == "update" for v in c.returns)

    def _down(self, storage: int) -> list[Step]:
        moves = [Step(-1, storage, "below", "offload"), Step(-1, storage, "below", "wait")]
        return [*moves, Step(-1, storage, "below")] if storage in self.stays else moves

    def _updated(self, node: ComputeNode) -> int:
        if node.phase != "update":
            return -1
        return next((s for s in node.mutates if self.trace.storages[s].role == "parameter"), -1)

    def _woven(
        self,
        plain: Iterable[Step],
        before: Mapping[int, list[Step]],
        after: Mapping[int, list[Step]],
        on_cpu: Mapping[int, int],
    ) -> tuple[list[Step], set[int]]:
        """All steps, and temporary storages that go down for updates: gradients, and the scale that clips them."""
        gone: set[int] = set()
        steps: list[Step] = []
        for step in plain:
            if step.node < 0:
                steps.append(step)
                continue
            steps += before.get(step.node, [])
            if step.node in on_cpu:
                for storage in self.nodes[step.node].reads:
                    if storage in self.creator and storage not in gone:
                        steps += self._down(storage)
                        gone.add(storage)
                steps.append(Step(step.node, on_cpu[step.node], "below", "update"))
            else:
                steps.append(step)
            steps += after.get(step.node, [])
        steps += [Step(-1, parameter, "below", "wait") for parameter in on_cpu.values()]
        return steps, gone

    def _placed(self, steps: list[Step], gone: set[int], stays: Mapping[int, str]) -> Plan:
        storages, away = self.trace.storages, sorted(self.movable)
        bases: dict[int, str] = {}
        for value in self.trace.values:
            bases.setdefault(value.storage, value.name)
        names = {
            s: gradient_slot(storages[s].name) if storages[s].role == "gradient" else storages[s].name for s in away
        }
        slots = [Slot(s, names[s], storages[s].nbytes, storages[s].role, "below", True) for s in away]
        slots += [Slot(g, bases[g], storages[g].nbytes, "temporary", "device", False) for g in sorted(gone)]
        slots += [Slot(s, gradient_slot(p), storages[s].nbytes, "gradient", "below", True) for s, p in stays.items()]
        return Plan(steps, slots, TierState(below=frozenset(away), copied=frozenset(away)))

    def judge(self, plan: Plan) -> Outcome:
        """The referee's verdict."""
        return replay_plan(
            self.trace.storages,
            self.nodes,
            plan.steps,
            keep=self.keep,
            link=Link(1e9, 1e9, 1.5e9),
            start=plan.start,
            cpu_update_s={n.node: 1e-3 for n in self.nodes if n.phase == "update"},
        )

    def program(
        self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None, offloading: Offloading | None
    ) -> Program:
        """Generated code, bound to a model."""
        source = emit_step(self.trace, self.nodes, self.judge(plan).rows, _summary(), plan.slots)
        known = manifest_of(source, "by hand", "").source_hash
        return bind(source, known, f"by_hand_{known[:8]}.py", self.trace, model, optimizer, plan.slots, offloading)


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
