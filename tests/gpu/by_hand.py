"""Plans without a solver: a step is traced, scheduled by simple rules, judged by the referee, and run beside eager.

A machine with a GPU need not have what planning needs.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.device.tiers import Tier
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, Link, TierState
from stowage.stages.ir.plan import PlanSummary, Slot
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import left_behind
from stowage.stages.partition.fold import fold
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.simulate.plan import Outcome, Step, replay_plan
from stowage.stages.trace import MicroBatch, trace_step
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch

GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 128}
LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 128,
}
ARCHITECTURES = {"gpt2": GPT2, "llama": LLAMA}
MOVABLE = 4096
"""Bytes from which parameters and states move."""


@dataclass(frozen=True)
class Plan:
    """Actions in order, and where storages are between iterations."""

    steps: list[Step]
    slots: list[Slot]
    start: TierState = EVERYTHING_ON_DEVICE


def build(architecture: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
    """The same model and batch every time."""
    model = build_model(architecture, ARCHITECTURES[architecture], seed=0).to(device=device, dtype=dtype)
    return model, sample_batch(model, 2, 16, 1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """What these tests train with."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Traced:
    """A step's tables and compute nodes: forward, backward, then updates."""

    def __init__(
        self, architecture: str, device: str, dtype: torch.dtype = torch.float32, max_grad_norm: float | None = None
    ) -> None:
        model, batch = build(architecture, device, dtype)
        self.trace: TraceTables = trace_step(
            model, batch, optimizer=adamw(model), micro_batch=MicroBatch(max_grad_norm=max_grad_norm)
        )
        costs = {c.signature: Cost(c.signature, "", 1e-3, 0, 0, 1, "measured") for c in self.trace.calls}
        folded: list[ComputeNode] = list(fold(self.trace, costs).nodes)
        order = sorted(folded, key=lambda n: (n.phase == "update", n.node))
        self.nodes = [dataclasses.replace(n, node=i) for i, n in enumerate(order)]
        self.keep = frozenset(self.trace.values[v].storage for v in left_behind(self.trace))
        self.temporary = {s.storage for s in self.trace.storages if s.role == "temporary"}
        self.creator = {s: n for n in self.nodes for s in n.creates}
        self.movable = {
            s.storage for s in self.trace.storages if s.role in ("parameter", "state") and s.nbytes >= MOVABLE
        }

    def with_frees(self, executions: Sequence[int]) -> list[Step]:
        """Each copy of a temporary storage is freed after its last use."""
        last: dict[tuple[int, int], int] = {}
        copy: dict[int, int] = {}
        for place, number in enumerate(executions):
            node = self.nodes[number]
            for storage in node.creates:
                copy[storage] = place
            for storage in self.temporary.intersection((*node.reads, *node.creates)):
                last[storage, copy[storage]] = place
        ends = {copy[s]: s for s in self.keep}
        gone: dict[int, list[int]] = defaultdict(list)
        for (storage, made), place in last.items():
            if not (storage in self.keep and made in ends and copy[storage] == made):
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
                if storage in self.temporary and storage not in here:
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

        Args:
            ahead, lag: in nodes.
            below: parameters are updated by the CPU.
        """
        on_cpu = {n.node: self._updated(n) for n in self.nodes if below and self._updated(n) in self.movable}
        uses: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes:
            if node.node not in on_cpu:
                for storage in self.movable.intersection((*node.reads, *node.mutates)):
                    uses[storage].append(node.node)
        before: dict[int, list[Step]] = defaultdict(list)
        after: dict[int, list[Step]] = defaultdict(list)
        last = len(self.nodes) - 1
        for storage, places in sorted(uses.items()):
            free_from = 0
            for first, end in _stretches(places, ahead + lag + 2):
                before[max(free_from, first - ahead)].append(Step(-1, storage, "up", "reload"))
                before[first].append(Step(-1, storage, "up", "wait"))
                changed = any(storage in self.nodes[n].mutates for n in range(first, end + 1) if n not in on_cpu)
                leave = min(end + lag, last)
                if changed:
                    after[end].append(Step(-1, storage, "down", "offload"))
                    after[leave].append(Step(-1, storage, "down", "wait"))
                after[leave].append(Step(-1, storage, "down"))
                free_from = leave + 1
        plain = self.with_frees(range(len(self.nodes)))
        return self._woven(plain, before, after, on_cpu)

    def _updated(self, node: ComputeNode) -> int:
        if node.phase != "update":
            return -1
        return next((s for s in node.mutates if self.trace.storages[s].role == "parameter"), -1)

    def _woven(
        self, plain: list[Step], before: dict[int, list[Step]], after: dict[int, list[Step]], on_cpu: dict[int, int]
    ) -> Plan:
        down = {
            n: [s for s in self.nodes[n].reads if s in self.temporary] for n in on_cpu
        }  # with the scale of clipping
        gone: set[int] = set()
        steps: list[Step] = []
        for step in plain:
            if step.node < 0:
                steps.append(step)
                continue
            steps += before[step.node]
            if step.node in on_cpu:
                for storage in down[step.node]:
                    if storage not in gone:
                        steps += [Step(-1, storage, "below", "offload"), Step(-1, storage, "below", "wait")]
                        gone.add(storage)
                steps.append(Step(step.node, on_cpu[step.node], "below", "update"))
            else:
                steps.append(step)
            steps += after[step.node]
        steps += [Step(-1, parameter, "below", "wait") for parameter in on_cpu.values()]
        away = sorted(self.movable)
        bases: dict[int, str] = {}
        for value in self.trace.values:
            bases.setdefault(value.storage, value.name)
        storages = self.trace.storages
        slots = [Slot(s, storages[s].name, storages[s].nbytes, storages[s].role, "below", True) for s in away]
        slots += [Slot(g, bases[g], storages[g].nbytes, "temporary", "device", False) for g in sorted(gone)]
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
        self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, tier: Tier | None = None
    ) -> Program:
        """Generated code, bound to a model."""
        source = emit_step(self.trace, self.nodes, self.judge(plan).rows, _summary(), plan.slots)
        known = manifest_of(source, "by hand", "").source_hash
        offloading = Offloading(tier, model, optimizer) if tier is not None else None
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


def eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], max_grad_norm: float | None = None
) -> float:
    """One iteration of plain PyTorch."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return float(loss.detach())
