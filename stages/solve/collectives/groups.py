"""Lowers the choices that ZeRO, Elixir and FSDP2 make for groups of parameters to plans, and proposes such plans.

A choice says for each group whether its shards live in the host, where the CPU updates them, and whether its gathered
weights stay from forward to backward. Here the first is a set of parameters and the second a set of gathers:

    device, reshard   the gather runs again in backward
    device, keep      it runs once
    host, reshard     the shard is reloaded one step of the cycle before each gather, and freed after it
    host, keep        it is reloaded once; its gradient's shard is offloaded, and the CPU updates it, beside computing
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.solve.collectives.policies import gathered_again, gradients_whole, is_gather
from stowage.stages.solve.judged_plans import JudgedPlans
from stowage.stages.solve.offload.insertion import StepTransfers
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.proposal import Decision, JudgedPlan, Proposal, Proposals, Task

RECOMPUTED = (0.0, 0.5, 1.0)
"""Shares of the blocks that keep as little as they can for backward, the first ones of forward."""

KEPT = (1.0, 0.0)
"""Shares of the gathered weights that stay until backward, the last ones of forward."""

GUESSES = 4
"""Plans that are judged at most to find how many parameters have to live in the host."""


@dataclass(frozen=True)
class GroupsChoice:
    """A choice for every group.

    Attributes:
        on_host: parameters whose shards and states live in the host.
        kept: nodes that gather weights which stay until backward.
    """

    on_host: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


def lowered(
    offloader: Offloader,
    executions: Sequence[Execution],
    choice: GroupsChoice,
    *,
    ahead: int = 1,
    whole: bool = False,
    method: str,
) -> Proposal:
    """Return the plan that a choice makes of an order of executions.

    Args:
        offloader: the program and its lower tier.
        executions: an order in which every block runs once, step by step of the cycle.
        choice: the choice; parameters stay on the device that may not be offloaded, or that the CPU cannot update.
        ahead: steps of the cycle by which shards are reloaded before the step that needs them.
        whole: gradients stay whole until backward has ended, as ZeRO-1 has them.
        method: how the plan is called.
    """
    program = offloader.program
    executions = kept_or_gathered_again(executions, program.nodes, choice.kept)
    if whole:
        executions = _in_the_last_step(gradients_whole(executions, program.nodes), program.nodes)
    updates = {
        s: n for n in program.nodes if n.phase == "update" for s in choice.on_host.intersection(n.mutates)
    }  # frozen parameters have none
    host = frozenset(
        s
        for s in choice.on_host & offloader.movable
        if s not in updates or offloader.cpu_update_s(updates[s]) < math.inf
    )
    if not host:
        return Proposal(method=method, steps=program.steps(executions), decision=Decision(method))
    on_cpu = frozenset(updates[s].node for s in host if s in updates)
    executions = [e for e in executions if e.node not in on_cpu]
    transfers = _Transfers(offloader, executions, ahead)
    for storage in sorted(host):
        transfers.add(storage, updates.get(storage))
    states = (s for node in on_cpu for s in offloader.movable.intersection(program.nodes[node].mutates))
    return offloader.proposal(method, executions, transfers.listed(), host.union(states), Decision(method))


def kept_or_gathered_again(
    executions: Sequence[Execution], nodes: Sequence[ComputeNode], kept: frozenset[int]
) -> list[Execution]:
    """Return an order in which the gathers in `kept` run once, and all others again for backward."""
    again = gathered_again(executions, nodes, kept)
    done: set[int] = set()
    found = []
    for execution in again:
        if execution.node in kept and execution.node in done:
            continue
        done.add(execution.node)
        found.append(execution)
    return found


def _in_the_last_step(executions: Sequence[Execution], nodes: Sequence[ComputeNode]) -> list[Execution]:
    """Return the executions, of which those of updates belong to the last step of the cycle."""
    last = max(e.step for e in executions)
    return [replace(e, step=last) if nodes[e.node].phase == "update" else e for e in executions]


class _Transfers:
    """Collects the transfers of each step of the cycle."""

    def __init__(self, offloader: Offloader, executions: Sequence[Execution], ahead: int) -> None:
        self._program = offloader.program
        self._ahead = ahead
        self._end = 2 * len(offloader.chain.blocks)
        self._read: dict[int, set[int]] = defaultdict(set)
        self._made: dict[int, int] = {}
        for execution in executions:
            node = self._program.nodes[execution.node]
            for storage in offloader.movable.intersection((*node.reads, *node.mutates)):
                self._read[storage].add(execution.step)
            self._made.update(dict.fromkeys((*node.creates, *node.mutates), execution.step))
        self._free: list[list[int]] = [[] for _ in range(self._end + 1)]
        self._reload: list[list[int]] = [[] for _ in range(self._end + 1)]
        self._offload: list[list[int]] = [[] for _ in range(self._end + 1)]
        self._update: list[list[int]] = [[] for _ in range(self._end + 1)]

    def add(self, parameter: int, update: ComputeNode | None) -> None:
        """Reload a parameter for each of its readers, and let the CPU update it when its gradient has arrived."""
        last = 0
        for first, last in self._windows(parameter):
            self._reload[first].append(parameter)
            self._free[last + 1].append(parameter)
        if update is None:
            return
        gradients = [s for s in update.reads if self._program.storages[s].role == "temporary"]
        for gradient in gradients:
            self._offload[self._made[gradient]].append(gradient)
            self._free[self._made[gradient] + 1].append(gradient)
        self._update[max([last, *(self._made[g] for g in gradients)]) + 1].append(parameter)

    def _windows(self, storage: int) -> Iterator[tuple[int, int]]:
        """Yield the first and last step of each stretch during which a storage is on the device."""
        first = last = -1
        for step in sorted(self._read[storage]):
            begin = max(step - self._ahead, 0)
            if first >= 0 and begin > last + 1:
                yield first, last
                first = begin
            first, last = (begin if first < 0 else first), step
        if first >= 0:
            yield first, last

    def listed(self) -> list[StepTransfers]:
        """Return them."""
        lists = zip(self._free, self._reload, self._offload, self._update, strict=True)
        return [StepTransfers(tuple(f), tuple(r), tuple(o), tuple(u)) for f, r, o, u in lists]


@dataclass(frozen=True)
class GroupPolicies:
    """Proposes choices for groups: blocks recompute or not, gathers are kept or not, and as few as must are offloaded.

    Those whose gradients come first are in the host first: the CPU has most time for them, until forward needs them.

    Attributes:
        offloader: the program and its lower tier.
        plans: what was judged so far; orders whose computing alone takes longer than the best of it are left out.
    """

    offloader: Offloader
    plans: JudgedPlans

    def propose(self, task: Task) -> Proposals:
        """Propose a plan for each share of blocks that recompute and of weights that are kept."""
        fastest_s = min((p.time_s for p in self.plans.fitting), default=math.inf)
        chain, nodes = self.offloader.chain, self.offloader.program.nodes
        count = len(chain.blocks)
        hosted = self._in_order_of_gradients()
        seen: set[tuple[Execution, ...]] = set()
        for share in RECOMPUTED:
            lean = round(share * count)
            options = [*chain.leanest_options[:lean], *chain.fastest_options[lean:]]
            executions = self.offloader.executions(options)
            if self._computing_s(executions) >= fastest_s:
                continue
            for kept in kept_sets(executions, nodes):
                order = kept_or_gathered_again(executions, nodes, kept)
                if tuple(order) not in seen:
                    seen.add(tuple(order))
                    yield from self._fewest(task, executions, kept, hosted, f"groups, {share:.0%} recomputed")

    def _computing_s(self, executions: Iterable[Execution]) -> float:
        """Return the time of what only the device computes."""
        ran = (self.offloader.program.nodes[e.node] for e in executions)
        return sum(n.time_s for n in ran if not n.collective and n.phase != "update")

    def _in_order_of_gradients(self) -> list[int]:
        """Return the parameters that the CPU can update, those first whose gradients come first."""
        program, movable = self.offloader.program, self.offloader.movable
        found: dict[int, int] = {}
        for position, node in enumerate(program.nodes):
            if node.phase == "update" and self.offloader.cpu_update_s(node) < math.inf:
                for storage in movable.intersection(node.mutates):
                    if program.storages[storage].role == "parameter":
                        found[storage] = position
        return sorted(found, key=found.__getitem__)

    def _fewest(
        self, task: Task, executions: Sequence[Execution], kept: frozenset[int], hosted: Sequence[int], method: str
    ) -> Proposals:
        """Propose plans with more or fewer parameters in the host, until as few as the budget admits are there."""
        budget_bytes = task.budget_bytes

        def plan(count: int) -> Proposal:
            choice = GroupsChoice(frozenset(hosted[:count]), kept)
            return lowered(self.offloader, executions, choice, method=method)

        most = yield plan(len(hosted))
        if most is None or most.peak_bytes > budget_bytes:
            return
        none = yield plan(0)
        if none is None or none.peak_bytes <= budget_bytes:
            return
        below, above = (0, none), (len(hosted), most)
        for _ in range(GUESSES):
            if above[0] - below[0] <= max(1, len(hosted) // 100):
                return
            middle = _between(below, above, budget_bytes)
            found = yield plan(middle)
            if found is None:
                return
            if found.peak_bytes <= budget_bytes:
                above = middle, found
            else:
                below = middle, found


def _between(below: tuple[int, JudgedPlan], above: tuple[int, JudgedPlan], budget_bytes: int) -> int:
    """Return a count where a straight line between two peaks meets the budget, a little on the safe side."""
    (low, more), (high, less) = below, above
    share = (more.peak_bytes - budget_bytes) / max(more.peak_bytes - less.peak_bytes, 1)
    guess = low + int(share * (high - low)) + max(1, (high - low) // 50)
    return min(max(guess, low + 1), high - 1)


def kept_sets(executions: Iterable[Execution], nodes: Sequence[ComputeNode]) -> list[frozenset[int]]:
    """Return sets of gathers whose weights stay until backward."""
    gathers = list(dict.fromkeys(e.node for e in executions if is_gather(nodes[e.node])))
    found = [frozenset(gathers[len(gathers) - round(share * len(gathers)) :]) for share in KEPT]
    return list(dict.fromkeys(found))
