"""Makes the problem that O-ILP solves (thesis 4) of a chain and what of it may be offloaded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from stowage.stages.formulations.offload.problem import (
    OffloadBlock,
    OffloadMachine,
    OffloadOption,
    OffloadProblem,
    ParameterTensor,
    group_parameters,
)
from stowage.stages.ir.graph import SHARED, ComputeNode
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.offmate.choices import Choice


class ChainProblem:
    """Makes O-ILP's problem over the chain of `offloader`, for any budget.

    Attributes:
        offloader: the program, and what of it may be offloaded.
        choices: the ways to run each block.
        update_node: parameter -> the node that updates it.
        name_of: storage of a parameter -> O-ILP's name of it.
        parameter: O-ILP's name -> storage of the parameter.
    """

    def __init__(self, offloader: Offloader, choices: Sequence[Sequence[Choice]]) -> None:
        self.offloader = offloader
        self.choices = choices
        self._chain = offloader.chain
        self._program = offloader.program
        self._lower_tier = offloader.lower_tier
        self._count = len(self._chain.blocks)
        self._update_s = self._update_times()
        self.update_node = {
            s: n
            for n in self._program.nodes
            if n.phase == "update"
            for s in n.mutates
            if self._program.storages[s].role == "parameter"
        }
        self._cpu_update_s = {
            s: math.inf if self._waits(n) else offloader.cpu_update_s(n) for s, n in self.update_node.items()
        }
        self.name_of = {s.storage: str(s.storage) for s in self._program.storages if s.role == "parameter"}
        self.parameter = {name: storage for storage, name in self.name_of.items()}

    def _update_times(self) -> dict[int, float]:
        """Return the seconds of the update of each parameter."""
        found: dict[int, float] = defaultdict(float)
        for node in self._program.nodes:
            if node.phase == "update":
                for storage in node.mutates:
                    if self._program.storages[storage].role == "parameter":
                        found[storage] += node.time_s
        return dict(found)

    def _waits(self, update: ComputeNode) -> bool:
        """Return whether an update takes something else than a gradient that one block made, as it is."""
        return update.block == SHARED or any(self._program.storages[s].role == "gradient" for s in update.reads)

    def within(self, device_budget_bytes: int) -> OffloadProblem:
        """Return what O-ILP is asked for a device budget."""
        storages, movable = self._program.storages, self.offloader.movable
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
                    name=self.name_of[s.storage],
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
        machine = OffloadMachine(
            device_bytes=device_budget_bytes,
            fixed_bytes=self._program.base_bytes
            - grouped
            + self._program.shared_bytes
            + self._lower_tier.staging_for(len(movable)),
            link=self._lower_tier.link,
            host_bytes=self._lower_tier.capacity_bytes,
            management_s=self._lower_tier.dispatch_s * len(self._program.nodes) / (2 * self._count),
        )
        if self._lower_tier.disk is not None:
            # An update of what is on the disk reads it into the host.
            largest = max((t.nbytes + t.state_bytes for t, _ in tensors if math.isfinite(t.cpu_update_s)), default=0)
            machine = replace(
                machine,
                host_bytes=max(0, machine.host_bytes - largest),
                disk=self._lower_tier.disk.link,
                disk_bytes=self._lower_tier.disk.capacity_bytes,
            )
        return OffloadProblem(
            blocks=tuple(self._block(b) for b in range(self._count)),
            groups=group_parameters(tensors),
            machine=machine,
        )

    def _block(self, block: int) -> OffloadBlock:
        described = self._chain.blocks[block]
        costs = self._chain.chain_blocks[block]
        options = self._chain.options[described.block_hash]
        # The updates of small tensors, which are in no group, are part of backward.
        apart = self.offloader.movable
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
