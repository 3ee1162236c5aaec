"""OffMate (thesis 4): from the chain to the problem that O-ILP solves, and from its answer to moves of storages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stowage.stages.formulations.offload.problem import (
    OffloadBlock,
    OffloadMachine,
    OffloadOption,
    OffloadProblem,
    ParameterTensor,
    group_parameters,
)
from stowage.stages.formulations.offload.rounding.rounding import RoundedPlan
from stowage.stages.ir.block import BlockGraph, BlockSchedule
from stowage.stages.ir.encoding import schedule_of
from stowage.stages.ir.graph import SHARED, ComputeNode
from stowage.stages.solve.offload.insertion import StepMoves
from stowage.stages.solve.offload.offloader import Below, Offloader
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solver.outcome import SolverSettings

T = TypeVar("T")

OPTIONS_PER_BLOCK = 6
"""Schedules of a block that O-ILP chooses among, before activations are offloaded."""


@dataclass(frozen=True)
class Choice:
    """One way to run a block: an option, and storages that leave the device between its forward and its backward; for
    the host, or on to the disk behind it."""

    option: int
    offloaded: tuple[int, ...] = ()
    to_disk: bool = False


class OffMate:
    """O-ILP over the chain that `offloader` plans for."""

    def __init__(self, offloader: Offloader, settings: SolverSettings, *, preprint: bool = False) -> None:
        """With `preprint` blocks have the three options that the OffMate preprint gives them."""
        self._offloader = offloader
        self._chain = offloader.chain
        self._program = offloader.program
        self._below: Below = offloader.below
        self._settings = settings
        self._count = len(self._chain.blocks)
        self._update_s = self._update_times()
        self._update_node = {
            s: n
            for n in self._program.nodes
            if n.phase == "update"
            for s in n.mutates
            if self._program.storages[s].role == "parameter"
        }
        self._cpu_update_s = {
            s: math.inf if self._waits(n) else offloader.cpu_update_s(n) for s, n in self._update_node.items()
        }
        self.choices = [self._three(b) if preprint else self._choices(b) for b in range(self._count)]

    # The problem.

    def _update_times(self) -> dict[int, float]:
        """Parameter storage -> seconds of its update."""
        found: dict[int, float] = defaultdict(float)
        for node in self._program.nodes:
            if node.phase == "update":
                for storage in node.mutates:
                    if self._program.storages[storage].role == "parameter":
                        found[storage] += node.time_s
        return dict(found)

    def _waits(self, update: ComputeNode) -> bool:
        """Whether it does not take a gradient that one block made, as it is."""
        return update.block == SHARED or any(self._program.storages[s].role == "gradient" for s in update.reads)

    def _three(self, block: int) -> list[Choice]:
        """The fastest schedule; the one that saves least; and of cheap recomputation with everything else offloaded."""
        costs = self._chain.chain_blocks[block].options
        rate = self._below.link.duplex_bytes_per_s
        fastest = min(range(len(costs)), key=lambda o: (costs[o].time_s, costs[o].save_bytes))
        leanest = min(range(len(costs)), key=lambda o: (costs[o].save_bytes, costs[o].time_s))
        cheap = min(range(len(costs)), key=lambda o: costs[o].time_s + 2 * costs[o].save_bytes / rate)
        offloaded = Choice(cheap, tuple(self._saved(block, cheap)))
        return list(dict.fromkeys([Choice(fastest), Choice(leanest), offloaded]))

    def _choices(self, block: int) -> list[Choice]:
        options = self._chain.options[self._chain.blocks[block].block_hash]
        costs = self._chain.chain_blocks[block].options
        key = [(o.time_s, o.save_bytes, max(o.forward_peak_bytes, o.backward_peak_bytes)) for o in costs]
        front = [
            o
            for o in range(len(options))
            if not any(
                all(x <= y for x, y in zip(key[p], key[o])) and (key[p] != key[o] or p < o) for p in range(len(options))
            )
        ]
        front.sort(key=lambda o: key[o])
        if len(front) > OPTIONS_PER_BLOCK:
            last = len(front) - 1
            picks = {round(i * last / (OPTIONS_PER_BLOCK - 1)) for i in range(OPTIONS_PER_BLOCK)}
            picks |= {min(range(len(front)), key=lambda i: key[front[i]][k]) for k in (1, 2)}
            front = [front[i] for i in sorted(picks)]
        found: list[Choice] = []
        for option in front:
            movable = self._saved(block, option)
            half: list[int] = []
            total = sum(self._program.nbytes[s] for s in movable)
            for storage in movable:
                if sum(self._program.nbytes[s] for s in half) >= total / 2:
                    break
                half.append(storage)
            for subset in dict.fromkeys([(), tuple(half), tuple(movable)]):
                found.append(Choice(option, subset))
                if subset and self._below.disk is not None:
                    found.append(Choice(option, subset, to_disk=True))
        return found

    def _saved(self, block: int, option: int) -> list[int]:
        """Storages that an option keeps for backward and that may leave meanwhile, the block's input included; large
        ones first."""
        if block == self._count - 1 or not self._below.activations:
            return []  # its backward follows at once
        described = self._chain.blocks[block]
        graph = self._chain.graph(block)
        schedule = schedule_of(self._chain.options[described.block_hash][option])
        found = {described.storages[a] for a in kept_for_backward(graph, schedule)}
        if block:
            before = self._chain.blocks[block - 1]
            found.update(before.storages[a] for a in self._chain.graph(block - 1).output)
        sizes = self._program.nbytes
        large = [s for s in found if sizes[s] >= self._below.smallest_bytes]
        return sorted(large, key=lambda s: (-sizes[s], s))

    def problem(self, device_budget_bytes: int) -> OffloadProblem:
        """What O-ILP is asked."""
        storages, movable = self._program.storages, self._offloader.movable
        states: dict[str, int] = defaultdict(int)
        for s in storages:
            if s.role == "state" and s.storage in movable:
                states[s.name.partition("::")[0]] += s.nbytes
        uses: dict[int, set[int]] = defaultdict(set)
        for node in self._program.nodes:
            if node.block != SHARED:
                for storage in {*node.reads, *node.mutates}:
                    uses[storage].add(node.block)
        tensors = [
            (
                ParameterTensor(
                    name=str(s.storage),
                    nbytes=s.nbytes,
                    state_bytes=states[s.name],
                    trainable=s.storage in self._update_s,
                    device_update_s=self._update_s.get(s.storage, 0.0),
                    cpu_update_s=self._cpu_update_s.get(s.storage, math.inf),
                ),
                uses[s.storage],
            )
            for s in storages
            if s.role == "parameter" and s.storage in movable and uses[s.storage]
        ]
        grouped = sum(t.nbytes + t.state_bytes for t, _ in tensors)
        base = sum(s.nbytes for s in storages if s.role != "temporary")
        machine = OffloadMachine(
            device_bytes=device_budget_bytes,
            fixed_bytes=base - grouped + self._shared_bytes() + self._below.staging_for(len(movable)),
            link=self._below.link,
            host_bytes=self._below.capacity_bytes,
            management_s=self._below.dispatch_s * len(self._program.nodes) / (2 * self._count),
        )
        if self._below.disk is not None:
            # An update of what is on the disk reads it into the host.
            largest = max((t.nbytes + t.state_bytes for t, _ in tensors if math.isfinite(t.cpu_update_s)), default=0)
            machine = replace(
                machine,
                host_bytes=max(0, machine.host_bytes - largest),
                disk=self._below.disk.link,
                disk_bytes=self._below.disk.capacity_bytes,
            )
        return OffloadProblem(
            blocks=tuple(self._block(b) for b in range(self._count)),
            groups=group_parameters(tensors),
            machine=machine,
        )

    def _shared_bytes(self) -> int:
        nodes = self._program.nodes
        made = {s for n in nodes if n.block == SHARED for s in n.creates}
        read = {s for n in nodes if n.block != SHARED for s in n.reads}
        return sum(self._program.nbytes[s] for s in made & read)

    def _block(self, block: int) -> OffloadBlock:
        described = self._chain.blocks[block]
        costs = self._chain.chain_blocks[block]
        options = self._chain.options[described.block_hash]
        # Of small tensors, which are in no group, the update is part of backward.
        apart = self._offloader.movable
        updates = sum(
            n.time_s
            for n in self._program.nodes
            if n.phase == "update" and n.block == block and not apart.isdisjoint(n.mutates)
        )

        def option(choice: Choice) -> OffloadOption:
            cost, known = costs.options[choice.option], options[choice.option]
            moved = sum(self._program.nbytes[s] for s in choice.offloaded)
            return OffloadOption(
                forward_time_s=known.forward_time_s,
                backward_time_s=max(0.0, known.backward_time_s - updates),
                save_bytes=cost.save_bytes - moved,
                forward_peak_bytes=cost.forward_peak_bytes,
                backward_peak_bytes=cost.backward_peak_bytes,
                offload_bytes=moved,
                disk_bytes=moved if choice.to_disk else 0,
            )

        return OffloadBlock(
            options=tuple(option(c) for c in self.choices[block]),
            backward_resident_bytes=costs.resident_bytes,
        )

    # The answer.

    def moves(self, rounded: RoundedPlan, *, early: bool) -> tuple[list[StepMoves], frozenset[int], list[Execution]]:
        """Moves of storages per step, what is below at the start, and the executions.

        Args:
            rounded: the plan of whole tensors.
            early: activations come up one step before their backward, not in it.
        """
        chosen = [self.choices[b][o] for b, o in enumerate(rounded.options)]
        options = [c.option for c in chosen]
        cycle = 2 * self._count
        free: list[list[int]] = [[] for _ in range(cycle + 1)]
        reload: list[list[int]] = [[] for _ in range(cycle + 1)]
        offload: list[list[int]] = [[] for _ in range(cycle + 1)]
        update: list[list[int]] = [[] for _ in range(cycle + 1)]
        on_cpu = {int(name) for name in rounded.on_cpu}
        nodes = {s: self._update_node[s] for s in on_cpu}
        started: set[int] = set()
        down_until: dict[int, int] = {}
        for t, step in _from_backward(rounded.steps):
            # What O-ILP leaves for the following forward starts when the iteration ends: gradients do not outlast it.
            wrapped = t < self._count
            for storage in (s for n in _numbers(step.offload_gradients) for s in self._gradient(n)):
                if storage not in down_until:
                    offload[cycle - 1 if wrapped else t].append(storage)
                down_until[storage] = cycle if wrapped else t + 1
            update[cycle if wrapped else t] += [int(name) for name, _ in step.update if int(name) not in started]
            started.update(int(name) for name, _ in step.update)
        for storage, t in down_until.items():
            free[t].append(storage)
        for t, step in enumerate(rounded.steps):
            free[t] += [*map(int, step.delete), *self._states(step.delete_states)]
            reload[t] += [*_numbers(step.reload), *self._states(n for n, _ in step.reload_states)]
            offload[t] += [*_numbers(step.offload), *self._states(n for n, _ in step.offload_states)]
        executions = self._offloader.executions(options, frozenset(n.node for n in nodes.values()))
        for storage, (last, back) in self._absences(executions, {s for c in chosen for s in c.offloaded}).items():
            offload[last].append(storage)
            free[last + 1].append(storage)
            reload[back - 1 if early and back - 1 > last + 1 else back].append(storage)
        resident = {*map(int, rounded.resident), *self._states(rounded.states_resident)}
        moving = {s for lists in (free, reload, offload) for found in lists for s in found}
        moving |= {s for n in nodes.values() for s in n.mutates if s in self._offloader.movable}
        below = frozenset(s for s in moving if self._program.storages[s].role != "temporary") - resident
        return (
            [StepMoves(tuple(f), tuple(r), tuple(o), tuple(u)) for f, r, o, u in zip(free, reload, offload, update)],
            below,
            executions,
        )

    def on_disk(self, rounded: RoundedPlan) -> frozenset[int]:
        """Storages that O-ILP wants on the disk behind the host."""
        chosen = (self.choices[b][o] for b, o in enumerate(rounded.options))
        activations = {s for c in chosen if c.to_disk for s in c.offloaded}
        return frozenset({*map(int, rounded.on_disk), *self._states(rounded.on_disk), *activations})

    def _states(self, names: Iterable[str]) -> list[int]:
        by_parameter = self._states_of
        return [s for name in names for s in by_parameter.get(self._program.storages[int(name)].name, ())]

    @property
    def _states_of(self) -> Mapping[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for s in self._program.storages:
            if s.role == "state" and s.storage in self._offloader.movable:
                found[s.name.partition("::")[0]].append(s.storage)
        return found

    def _gradient(self, parameter: int) -> list[int]:
        """The storage of its gradient."""
        return [s for s in self._update_node[parameter].reads if self._program.storages[s].role == "temporary"]

    def _absences(self, executions: Sequence[Execution], wanted: set[int]) -> dict[int, tuple[int, int]]:
        """Of each wanted activation the last step of forward and the first of backward that use it, where at least one
        step lies between; those that are made again in between do not leave."""
        uses: dict[int, list[int]] = defaultdict(list)
        made: dict[int, int] = defaultdict(int)
        for execution in executions:
            node = self._program.nodes[execution.node]
            for storage in wanted.intersection((*node.reads, *node.creates)):
                uses[storage].append(execution.step)
            for storage in wanted.intersection(node.creates):
                made[storage] += 1
        found: dict[int, tuple[int, int]] = {}
        for storage, steps in uses.items():
            forward = [t for t in steps if t < self._count]
            backward = [t for t in steps if t >= self._count]
            if made[storage] == 1 and forward and backward and min(backward) - max(forward) >= 2:
                found[storage] = max(forward), min(backward)
        return found


def _from_backward(steps: Sequence[T]) -> Iterator[tuple[int, T]]:
    """Steps in the order in which gradients come: from the first backward one around the cycle."""
    half = len(steps) // 2
    return ((t % len(steps), steps[t % len(steps)]) for t in range(half, half + len(steps)))


def _numbers(transfers: Iterable[tuple[str, int]]) -> list[int]:
    return [int(name) for name, _ in transfers]


def kept_for_backward(graph: BlockGraph, schedule: BlockSchedule) -> set[int]:
    """Allocations in memory between forward and backward, the output aside: the next block still reads that."""
    kept: set[int] = set()
    for action in schedule.forward:
        if action.kind == "free":
            kept.discard(action.index)
        else:
            kept.update(graph.nodes[action.index].creates)
    return kept - set(graph.output)
