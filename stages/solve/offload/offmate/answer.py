"""Translates O-ILP's answer, rounded to whole tensors, into transfers of storages in each step of the cycle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from stowage.stages.formulations.offload.rounding.rounding import RoundedPlan
from stowage.stages.solve.offload.insertion import StepTransfers
from stowage.stages.solve.offload.offmate.problem import ChainProblem
from stowage.stages.solve.program.chain import Execution

T = TypeVar("T")


class Translator:
    """Turns rounded plans of a problem into transfers."""

    def __init__(self, problem: ChainProblem) -> None:
        self._problem = problem
        self._program = problem.offloader.program
        self._parameter = problem.parameter
        self._count = len(problem.choices)

    def transfers(
        self, rounded: RoundedPlan, *, early: bool
    ) -> tuple[list[StepTransfers], frozenset[int], list[Execution]]:
        """Return the transfers of each step, what is offloaded at the start, and the executions.

        Args:
            rounded: the plan of whole tensors.
            early: activations are reloaded one step before their backward, not in it.
        """
        chosen = [self._problem.choices[b][o] for b, o in enumerate(rounded.options)]
        options = [c.option for c in chosen]
        cycle = 2 * self._count
        free: list[list[int]] = [[] for _ in range(cycle + 1)]
        reload: list[list[int]] = [[] for _ in range(cycle + 1)]
        offload: list[list[int]] = [[] for _ in range(cycle + 1)]
        update: list[list[int]] = [[] for _ in range(cycle + 1)]
        on_cpu = {self._parameter[name] for name in rounded.on_cpu}
        nodes = {s: self._problem.update_node[s] for s in on_cpu}
        started: set[int] = set()
        down_until: dict[int, int] = {}
        for t, step in _from_backward(rounded.steps):
            # Offloads that O-ILP leaves for the following forward start as the iteration ends: gradients end with it.
            wrapped = t < self._count
            for storage in (s for n in self._moved(step.offload_gradients) for s in self._gradient(n)):
                if storage not in down_until:
                    offload[cycle - 1 if wrapped else t].append(storage)
                down_until[storage] = cycle if wrapped else t + 1
            updated = self._moved(step.update)
            update[cycle if wrapped else t] += [s for s in updated if s not in started]
            started.update(updated)
        for storage, t in down_until.items():
            free[t].append(storage)
        for t, step in enumerate(rounded.steps):
            free[t] += [*self._storages(step.delete), *self._states(step.delete_states)]
            reload[t] += [*self._moved(step.reload), *self._states(n for n, _ in step.reload_states)]
            offload[t] += [*self._moved(step.offload), *self._states(n for n, _ in step.offload_states)]
        executions = self._problem.offloader.executions(options, frozenset(n.node for n in nodes.values()))
        for storage, (last, back) in self._absences(executions, {s for c in chosen for s in c.offloaded}).items():
            offload[last].append(storage)
            free[last + 1].append(storage)
            reload[back - 1 if early and back - 1 > last + 1 else back].append(storage)
        resident = {*self._storages(rounded.resident), *self._states(rounded.states_resident)}
        moving = {s for lists in (free, reload, offload) for found in lists for s in found}
        moving |= {s for n in nodes.values() for s in n.mutates if s in self._problem.offloader.movable}
        at_rest = frozenset(s for s in moving if self._program.storages[s].role != "temporary") - resident
        return (
            [
                StepTransfers(tuple(f), tuple(r), tuple(o), tuple(u))
                for f, r, o, u in zip(free, reload, offload, update)
            ],
            at_rest,
            executions,
        )

    def on_disk(self, rounded: RoundedPlan) -> frozenset[int]:
        """Return the storages that O-ILP places on the disk behind the host."""
        chosen = (self._problem.choices[b][o] for b, o in enumerate(rounded.options))
        activations = {s for c in chosen if c.to_disk for s in c.offloaded}
        return frozenset({*self._storages(rounded.on_disk), *self._states(rounded.on_disk), *activations})

    def _storages(self, names: Iterable[str]) -> list[int]:
        """Return the parameters that O-ILP's names name."""
        return [self._parameter[name] for name in names]

    def _moved(self, transfers: Iterable[tuple[str, float]]) -> list[int]:
        """Return the parameters of some transfers, which are pairs of a name and bytes."""
        return [self._parameter[name] for name, _ in transfers]

    def _states(self, names: Iterable[str]) -> list[int]:
        """Return the movable states of the parameters that O-ILP's names name."""
        return [s for parameter in self._storages(names) for s in self._states_of.get(parameter, ())]

    @cached_property
    def _states_of(self) -> Mapping[int, list[int]]:
        storages, found = self._program.storages, dict[str, list[int]]()
        for s in storages:
            if s.role == "state" and s.storage in self._problem.offloader.movable:
                found.setdefault(s.name.partition("::")[0], []).append(s.storage)
        return {p: found[storages[p].name] for p in self._parameter.values() if storages[p].name in found}

    def _gradient(self, parameter: int) -> list[int]:
        """Return the storage of a parameter's gradient."""
        return [s for s in self._problem.update_node[parameter].reads if self._program.storages[s].role == "temporary"]

    def _absences(self, executions: Sequence[Execution], wanted: set[int]) -> dict[int, tuple[int, int]]:
        """Return for wanted activations the last step of forward and the first of backward that use each.

        At least one step must lie between; activations that are made again in between are not offloaded.
        """
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
    """Return the steps in the order in which gradients come: from the first backward one around the cycle."""
    half = len(steps) // 2
    return ((t % len(steps), steps[t % len(steps)]) for t in range(half, half + len(steps)))
