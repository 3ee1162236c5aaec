"""Says what of a program may be offloaded, and makes plans from decisions for each step of the cycle."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.updates import can_move, gradient_slot
from stowage.stages.solve.offload.cpu_updates import UpdatesOnCpu
from stowage.stages.solve.offload.insertion import StepTransfers, insert_transfers
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.chain import Chain, Execution, once
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.proposal import Decision, Proposal


class Offloader:
    """A program with its lower tier.

    Attributes:
        program, chain, lower_tier: what is planned.
        movable: parameters and states that may be offloaded.
        gradients: gradients that wait, before or after the iteration, and may be offloaded; with the names of their
            slots.
        clipping: norms of gradients, and the scale that clips all of them.
    """

    def __init__(self, program: StepProgram, chain: Chain, lower_tier: LowerTier) -> None:
        self.program = program
        self.chain = chain
        self.lower_tier = lower_tier
        self.movable = frozenset(
            s.storage
            for s in program.storages
            if s.role in ("parameter", "state") and s.nbytes >= lower_tier.smallest_bytes and can_move(s.name)
        ).difference(program.pinned)
        waiting = {s.storage: s.name for s in program.storages if s.role == "gradient"} | dict(program.gradients)
        self.gradients = {
            s: gradient_slot(name)
            for s, name in waiting.items()
            if lower_tier.gradients and program.nbytes[s] >= lower_tier.smallest_bytes
        }
        self._cpu_updates = UpdatesOnCpu(program, lower_tier)
        self.clipping = self._cpu_updates.clipping

    def cpu_update_s(self, node: ComputeNode) -> float:
        """Return the seconds of an update node on the CPU; infinite where it cannot do it."""
        return self._cpu_updates.seconds(node)

    def needs(self, executions: Sequence[Execution]) -> list[frozenset[int]]:
        """Return the movable storages that each step of the cycle uses."""
        found: list[set[int]] = [set() for _ in range(2 * len(self.chain.blocks))]
        for execution in executions:
            node = self.program.nodes[execution.node]
            found[execution.step].update(self.movable.intersection((*node.reads, *node.mutates)))
        return [frozenset(f) for f in found]

    def executions(self, options: Sequence[int], on_cpu: frozenset[int] = frozenset()) -> list[Execution]:
        """Run every block once, with the given options, but for update nodes `on_cpu`."""
        whole = self.program.without_dead(self.chain.executions(once(options)))
        return [e for e in whole if e.node not in on_cpu]

    def leanest(self) -> list[Execution]:
        """Run every block once, with the option that keeps least for backward."""
        return self.executions(self.chain.leanest_options)

    def proposal(
        self,
        method: str,
        executions: Sequence[Execution],
        transfers: Sequence[StepTransfers],
        lower_tier: frozenset[int],
        decision: Decision,
    ) -> Proposal:
        """Put transfers among executions.

        Args:
            method: how the plan was made.
            executions: what is computed, in order.
            transfers: what is transferred in each step of the cycle.
            lower_tier: parameters and states that are offloaded when an iteration starts.
            decision: who decided the plan.
        """
        program = self.program
        moved = insert_transfers(
            program.steps(executions), program.cycle_steps(executions), transfers, program.nodes, lower_tier
        )
        return Proposal(method=method, steps=moved.steps, state=moved.state, decision=decision, tier=self.lower_tier)
