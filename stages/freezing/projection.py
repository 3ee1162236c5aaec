"""Makes the plan that runs under one mask, for the referee to judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stowage.stages.freezing.guards import Guards
from stowage.stages.freezing.outputs import without_unread
from stowage.stages.freezing.owners import Owners
from stowage.stages.freezing.workspaces import Workspaces
from stowage.stages.ir.actions import ACTIONS
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, TierState
from stowage.stages.ir.step import Step
from stowage.stages.ir.sums import taken_memory
from stowage.stages.ir.trace import Storage, TraceTables
from stowage.stages.ir.units import Unit
from stowage.stages.simulate.lower_tier import NO_TIER, ReplayedTier
from stowage.stages.simulate.plan import Outcome, replay_plan
from stowage.stages.simulate.stored import kept_storages


@dataclass(frozen=True)
class Projection:
    """What runs under one mask.

    Attributes:
        storages: the step's storages; gradients of frozen units, which would wait, have no bytes.
        nodes: the step's nodes, which make and read what there is.
        steps: the rows that run.
        skipped: nodes that do not run.
        keep: see `replay_plan`.
        start: where persistent storages are when the iteration begins.
    """

    storages: list[Storage]
    nodes: list[ComputeNode]
    steps: list[Step]
    skipped: frozenset[int]
    keep: frozenset[int]
    start: TierState

    def replay(self, budget_bytes: int | None = None, tier: ReplayedTier = NO_TIER) -> Outcome:
        """Let the referee judge it.

        Raises:
            IllegalPlanError: it is not legal, or does not fit the budget.
        """
        return replay_plan(
            self.storages,
            self.nodes,
            self.steps,
            keep=self.keep,
            budget_bytes=budget_bytes,
            start=self.start,
            tier=tier,
            skipped=self.skipped,
        )


@dataclass(frozen=True)
class Guarded:
    """A plan with the guards of its rows.

    Attributes:
        trace, nodes: the step.
        steps: the plan.
        units: what may be frozen.
        guards: the guards of the rows.
        start: where persistent storages are between iterations.
    """

    trace: TraceTables
    nodes: Sequence[ComputeNode]
    steps: Sequence[Step]
    units: Sequence[Unit]
    guards: Guards
    start: TierState = EVERYTHING_ON_DEVICE

    @cached_property
    def workspaces(self) -> Workspaces:
        """Return what finds the workspaces of its rows."""
        return Workspaces(self.trace, self.units)

    @cached_property
    def taken(self) -> dict[int, int]:
        """Return, for each sum that is written over a summand in every row that computes it, that summand."""
        moved = {s.storage for s in self.steps if ACTIONS[s.kind].transfers}
        moved |= self.start.offloaded | self.start.reloading | self.start.copied
        rows = ((s.node if s.kind == "compute" else -1, s.storage if s.kind == "free" else -1) for s in self.steps)
        found = taken_memory(self.nodes, rows, moved)
        summands: dict[int, set[int]] = {}
        for number, step in enumerate(self.steps):
            if step.kind == "compute":
                summands.setdefault(step.node, set()).add(found.get(number, -1))
        return {n: s for n, s in found.items() if len(summands[self.steps[n].node]) == 1}

    def under(self, mask: int) -> Projection:
        """Return what runs under a mask."""
        owners, rows = Owners(self.trace, self.nodes, self.units), self.guards.rows
        absent = {s for s, own in owners.waiting().items() if not own & mask}
        idle = {s.storage for n, s in enumerate(self.steps) if s.kind == "update" and not rows[n] & mask}
        unmoved = {s for n in self.nodes if n.phase == "update" and idle.intersection(n.mutates) for s in n.mutates}
        nodes, ran, found = list(self.nodes), set[int](), list[Step]()
        begun = set(self.start.updating)
        for number, step in enumerate(self.steps):
            before = step.kind == "wait" and step.storage in begun
            begun -= {step.storage} if before else set()
            if not rows[number] & mask or (before and step.storage in idle):
                continue
            found.append(step)
            if step.node >= 0:
                ran.add(step.node)
                nodes[step.node] = self._masked(nodes[step.node], number, mask)
            released = self._released(step, nodes, number, mask)
            found += [Step(-1, s, step.label) for s in released]
        start = self.start
        return Projection(
            [replace(s, role="constant", nbytes=0) if s.storage in absent else s for s in self.trace.storages],
            nodes,
            found,
            frozenset(n.node for n in nodes) - ran,
            kept_storages(self.trace) - absent - {s for s, own in owners.kept.items() if not own & mask},
            replace(
                start,
                offloaded=start.offloaded - absent,
                reloading=start.reloading - absent,
                offloading=start.offloading - absent,
                updating=start.updating - idle,
                copied=start.copied.union(unmoved if start.updating & idle else ()) - absent,
            ),
        )

    def _masked(self, node: ComputeNode, number: int, mask: int) -> ComputeNode:
        """Return a node that makes and reads what it does under a mask."""
        guards = self.guards
        outputs, guard = guards.outputs[number], guards.rows[number]
        node = replace(node, workspace_bytes=self.workspaces.of(node, outputs, guard).under(mask))
        node = without_unread(self.trace, node, outputs, guard, mask)
        if node.takes:  # rows that do not run, and what dies earlier, change nothing in the code of a sum
            node = replace(node, takes=(self.taken[number],) if number in self.taken else ())
        absent = {one.storage for one in guards.stand_ins.get(number, ()) if not one.guard & mask}
        if absent:  # something of their form is made for the row
            nbytes = sum(self.trace.storages[s].nbytes for s in absent)
            reads = tuple(s for s in node.reads if s not in absent)
            node = replace(node, reads=reads, workspace_bytes=node.workspace_bytes + nbytes)
        lacking: Mapping[int, int] = {**guards.lacking.get(number, {}), **guards.wholes.get(number, {})}
        if not lacking:
            return node
        return replace(node, reads=tuple(s for s in node.reads if lacking.get(s, mask) & mask))

    def _released(self, step: Step, nodes: Sequence[ComputeNode], number: int, mask: int) -> list[int]:
        """Return the storages that die behind a row under a mask, though the plan frees them later."""
        releases = self.guards.releases.get(number, {})
        unmade = set(self.nodes[step.node].creates).difference(nodes[step.node].creates) if step.node >= 0 else set()
        unmade |= {one.storage for one in self.guards.stand_ins.get(number, ()) if not one.guard & mask}
        lacking = {**self.guards.lacking.get(number, {}), **self.guards.wholes.get(number, {})}
        return [
            s for s, later in releases.items() if not later & mask and s not in unmade and lacking.get(s, mask) & mask
        ]
