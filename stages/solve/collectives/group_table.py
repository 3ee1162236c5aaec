"""Describes a sharded program as a table of groups of parameters, from which choices for whole groups are made.

Elixir and FSDP2 choose for groups: what a module gathers in one collective. The table has a row for each, with sizes
and times as the program's plans have them. Sizes are of the whole model, as if one byte were one element.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.solve.collectives.groupings import Grouping
from stowage.stages.solve.collectives.groups import GroupsChoice
from stowage.stages.solve.collectives.policies import is_gather
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Execution

NEVER = 1000.0
"""Times that the host needs for its updates, in times of computing, where the CPU cannot update."""


@dataclass(frozen=True)
class GroupTable:
    """A program's groups.

    Attributes:
        members: the parameters of each group, in the order in which forward first uses them.
        gathers: the nodes that gather weights, with the groups that they gather for.
        problem: what the choices are made from.
    """

    members: tuple[frozenset[int], ...]
    gathers: dict[int, frozenset[int]]
    problem: ShardingProblem

    def choice(self, choices: Sequence[GroupChoice]) -> GroupsChoice:
        """Return what a choice for every group says of parameters and of gathers."""
        host = frozenset(s for c, found in zip(choices, self.members, strict=True) if c.on_host for s in found)
        kept = frozenset(n for n, groups in self.gathers.items() if all(choices[g].keep for g in groups))
        return GroupsChoice(host, kept)

    def within(self, device_bytes: int, fixed_bytes: int) -> ShardingProblem:
        """Return the problem with another budget, and with bytes of the device that no choice changes."""
        return replace(self.problem, device_budget=device_bytes, fixed_bytes=fixed_bytes)


def table_of(
    offloader: Offloader,
    executions: Sequence[Execution],
    grouping: Grouping,
    budget_bytes: int,
) -> GroupTable:
    """Describe a program's groups.

    Args:
        offloader: the program, its chain and its lower tier.
        executions: the order in which plans of these choices compute, every block once.
        grouping: the groups.
        budget_bytes: bytes of the device.
    """
    members, root = grouping.members, grouping.root
    sizes = _Sizes(offloader, members)
    seconds = _seconds(offloader, executions, sizes.group_of)
    groups = tuple(
        ParameterGroup(
            group=g,
            modules=("" if g == root else str(g),),
            parameters=(),
            elements=sizes.whole(found),
            trainable=sizes.whole(sizes.trained(found)),
            stored_bytes=1,
            compute_bytes=1,
            state_bytes=sizes.state_bytes(found),
            forward_s=seconds[g, False],
            backward_s=seconds[g, True],
            saved_bytes=0,
            forward_peak_bytes=0,
            backward_peak_bytes=0,
        )
        for g, found in enumerate(members)
    )
    host_bytes = sizes.ranks * (offloader.lower_tier.host_room_bytes or offloader.lower_tier.capacity_bytes)
    machine = _machine(offloader, sizes, groups, budget_bytes, host_bytes)
    problem = ShardingProblem(groups, machine, budget_bytes, host_bytes, host_updates_beside=True)
    return GroupTable(members, sizes.gathers(), problem)


class _Sizes:
    """Counts bytes of a program's parameters, and of what belongs to them."""

    def __init__(self, offloader: Offloader, members: Sequence[Collection[int]]) -> None:
        self._program = offloader.program
        self.group_of = {s: g for g, found in enumerate(members) for s in found}
        self.updates = {
            s: n
            for n in self._program.nodes
            if n.phase == "update"
            for s in n.mutates
            if self._program.storages[s].role == "parameter"
        }
        """The update of each parameter that trains."""
        self.ranks = max((self._parts(n) for n in self._program.nodes if is_gather(n)), default=1)

    def _parts(self, gather: ComputeNode) -> int:
        """Return of how many shards a gather makes a whole."""
        nbytes = self._program.nbytes
        shards = sum(nbytes[s] for s in gather.reads if s in self.group_of)
        return max(1, round(sum(nbytes[s] for s in gather.creates) / shards)) if shards else 1

    def trained(self, parameters: Collection[int]) -> list[int]:
        """Return those that have an update."""
        return [s for s in parameters if s in self.updates]

    def whole(self, parameters: Collection[int]) -> int:
        """Return the bytes of gathered parameters."""
        return self.ranks * sum(self._program.nbytes[s] for s in parameters)

    def state_bytes(self, parameters: Collection[int]) -> int:
        """Return the bytes of states for each byte of the parameters that train."""
        trained = self.trained(parameters)
        weights = sum(self._program.nbytes[s] for s in trained)
        states = {s for p in trained for s in self.updates[p].mutates if self._program.storages[s].role == "state"}
        return round(sum(self._program.nbytes[s] for s in states) / weights) if weights else 0

    def gathers(self) -> dict[int, frozenset[int]]:
        """Return the groups of each node that gathers."""
        return {
            n.node: frozenset(self.group_of[s] for s in n.reads if s in self.group_of)
            for n in self._program.nodes
            if is_gather(n)
        }


def _seconds(
    offloader: Offloader, executions: Sequence[Execution], group_of: dict[int, int]
) -> defaultdict[tuple[int, bool], float]:
    """Return the seconds of computing in forward and backward of each group.

    A block belongs to the group that has most of the parameters that it reads; one that reads none, to the group of the
    block before.
    """
    nodes, count = offloader.program.nodes, len(offloader.chain.blocks)
    reads: dict[int, Counter[int]] = {}
    for node in nodes:
        if node.phase == "forward":
            found = [group_of[s] for s in node.reads if s in group_of]
            reads.setdefault(node.block, Counter()).update(found)
    owner: dict[int, int] = {}
    last = 0
    for block in range(count):
        most = reads.get(block, Counter()).most_common(1)
        owner[block] = last = most[0][0] if most else last
    seconds: defaultdict[tuple[int, bool], float] = defaultdict(float)
    for execution in executions:
        node = nodes[execution.node]
        if not node.collective and node.phase != "update":
            backward = execution.step >= count
            block = 2 * count - 1 - execution.step if backward else execution.step
            seconds[owner[block], backward] += node.time_s
    return seconds


def _machine(
    offloader: Offloader, sizes: _Sizes, groups: Sequence[ParameterGroup], budget_bytes: int, host_bytes: int
) -> ParallelMachine:
    """Return a machine whose rates give the program's times."""
    program, link, n = offloader.program, offloader.lower_tier.link, sizes.ranks
    gathers = [node for node in program.nodes if is_gather(node)]
    received = sum(program.nbytes[s] for node in gathers for s in node.creates) * (n - 1) / n
    gathering_s = sum(node.time_s for node in gathers)
    updates = list({node.node: node for node in sizes.updates.values()}.values())
    trained = sum(g.trainable for g in groups)
    on_device_s = sum(node.time_s for node in updates)
    never_s = NEVER * sum(g.forward_s + g.backward_s for g in groups)
    on_host_s = min(never_s, sum(offloader.cpu_update_s(node) for node in updates))
    return ParallelMachine(
        name="rank",
        ranks=n,
        device_bytes=budget_bytes,
        host_bytes=host_bytes,
        collective_bytes_per_s=received / gathering_s if received and gathering_s else 1.0,
        collective_latency_s=0.0,
        reload_bytes_per_s=n * link.reload_bytes_per_s,
        offload_bytes_per_s=n * link.offload_bytes_per_s,
        duplex_bytes_per_s=n * link.duplex_bytes_per_s,
        device_updates_per_s=trained / on_device_s if trained and on_device_s else math.inf,
        host_updates_per_s=trained / on_host_s if trained and on_host_s else math.inf,
        collectives_share_link=link.carries_collectives,
    )
