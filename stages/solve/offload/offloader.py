"""Plans that use the tier below the device: the problem that O-ILP solves, and the fixed policies it must beat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.chain.rk_rotor import ChainStep
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import BehindHost, Home, Link, TierState
from stowage.stages.ir.updates import can_move, gradient_slot
from stowage.stages.simulate.plan import Outcome, Step, replay_plan
from stowage.stages.solve.offload.hiding.shift import shift
from stowage.stages.solve.offload.homes import Moving, storages_on_disk
from stowage.stages.solve.offload.insertion import Moved, StepMoves, insert_moves
from stowage.stages.solve.offload.streaming import stream_everything
from stowage.stages.solve.program.chain import Chain, Execution
from stowage.stages.solve.program.program import Program

MOST_BYTES = 1 << 60


@dataclass(frozen=True)
class Below:
    """The tier below the device, and the disk behind it if there is one.

    Attributes:
        link: to it.
        capacity_bytes: room in it.
        home: what it is.
        disk: behind the host.
        staging_bytes: device memory that it needs for itself.
        padding_bytes: device memory that each tensor takes besides when it has been reloaded.
        cpu_update_bytes_per_s: bytes that an update by the CPU reads and writes per second, beside everything else; 0
            where the CPU is the device itself.
        dispatch_s: what starting an operation costs the CPU, which updates nothing meanwhile.
        activations: whether they may be offloaded too.
        gradients: whether those that wait for a later micro-batch may be below between the two.
        smallest_bytes: smaller parameters and states stay on the device: each copy costs something besides its bytes.
    """

    link: Link
    capacity_bytes: int
    staging_bytes: int = 0
    padding_bytes: int = 0
    smallest_bytes: int = 1 << 16
    cpu_update_bytes_per_s: float = 0.0
    dispatch_s: float = 0.0
    activations: bool = True
    gradients: bool = False
    home: Home = "host"
    disk: BehindHost | None = None

    @property
    def disk_room_bytes(self) -> int | None:
        """On whichever disk there is."""
        if self.disk is not None:
            return self.disk.capacity_bytes
        return self.capacity_bytes if self.home == "disk" else None

    def staging_for(self, reloaded: int) -> int:
        """Device memory that it needs for itself and for so many different tensors that come from it."""
        return self.staging_bytes + reloaded * self.padding_bytes

    def boundless(self) -> Below:
        """With room for anything."""
        disk = replace(self.disk, capacity_bytes=MOST_BYTES) if self.disk is not None else None
        return replace(self, capacity_bytes=MOST_BYTES, disk=disk)

    def lasting(self) -> Below:
        """Without the room on a disk, which changes from minute to minute."""
        if self.disk is not None:
            return replace(self, disk=replace(self.disk, capacity_bytes=0))
        return replace(self, capacity_bytes=0) if self.home == "disk" else self


@dataclass(frozen=True)
class OffloadPlan:
    """A plan with copies that the referee accepted.

    Attributes:
        method: how it was found.
        steps, state: see `Moved`.
        outcome: what the referee says.
        hidden: its copies are hidden as well as the budget allows.
        fractional_s: the time that O-ILP counts for its fractions; 0 for fixed policies.
        rates_bound_s: see `formulations/offload_bounds.py`; likewise.
    """

    method: str
    steps: list[Step]
    state: TierState
    outcome: Outcome
    hidden: bool = False
    fractional_s: float = 0.0
    rates_bound_s: float = 0.0


class Offloader:
    """Turns executions and decisions into plans that the referee accepts.

    Attributes:
        program, chain, below: what is planned.
        movable: parameters and states that may be below.
        gradients: those that wait, before or after the iteration, and may be below; with the names of their slots.
        late: norms of gradients, and the scale that clips all of them.
    """

    def __init__(self, program: Program, chain: Chain, below: Below) -> None:
        self.program = program
        self.chain = chain
        self.below = below
        self.movable = frozenset(
            s.storage
            for s in program.storages
            if s.role in ("parameter", "state") and s.nbytes >= below.smallest_bytes and can_move(s.name)
        ).difference(program.pinned)
        waiting = {s.storage: s.name for s in program.storages if s.role == "gradient"} | dict(program.gradients)
        self.gradients = {
            s: gradient_slot(name)
            for s, name in waiting.items()
            if below.gradients and program.nbytes[s] >= below.smallest_bytes
        }
        self.late = frozenset(s for n in program.nodes if n.phase == "update" for s in n.creates)

    def needs(self, executions: Sequence[Execution]) -> list[frozenset[int]]:
        """Movable storages that each step of the cycle uses."""
        found: list[set[int]] = [set() for _ in range(2 * len(self.chain.blocks))]
        for execution in executions:
            node = self.program.nodes[execution.node]
            found[execution.step].update(self.movable.intersection((*node.reads, *node.mutates)))
        return [frozenset(f) for f in found]

    def plan(
        self,
        method: str,
        executions: Sequence[Execution],
        moves: Sequence[StepMoves],
        below: frozenset[int],
        on_disk: frozenset[int] = frozenset(),
    ) -> OffloadPlan:
        """Insert the moves, find everything a place below, and let the referee judge.

        Args:
            method, executions, moves: the plan.
            below: see `insert_moves`.
            on_disk: what is to be on the disk behind the host, as far as it matters.

        Raises:
            IllegalPlanError: the referee refuses.
        """
        program = self.program
        moved: Moved = insert_moves(
            program.steps(executions), program.cycle_steps(executions), moves, program.nodes, below
        )
        return self.judged(method, moved.steps, moved.state, on_disk)

    def judged(
        self, method: str, steps: list[Step], start: TierState, on_disk: frozenset[int] = frozenset()
    ) -> OffloadPlan:
        """Find everything that moves a place below, and let the referee judge.

        Args:
            method, steps: the plan.
            start: the state of the tiers in which every iteration starts and ends.
            on_disk: see `plan`.

        Raises:
            IllegalPlanError: the referee refuses.
        """
        state = replace(start, on_disk=self._on_disk(steps, start, on_disk))
        return OffloadPlan(method, steps, state, self._judge(steps, state))

    def _on_disk(self, steps: Sequence[Step], start: TierState, wanted: frozenset[int]) -> frozenset[int]:
        if self.below.home == "host" and self.below.disk is None:
            return frozenset()
        moving = Moving.of(steps, start, self.program.nodes, self.program.nbytes)
        if self.below.home == "disk":
            return frozenset(moving.copies)
        return storages_on_disk(moving, self.program.nbytes, wanted, self.below.capacity_bytes)

    def _judge(self, steps: Sequence[Step], state: TierState) -> Outcome:
        return replay_plan(
            self.program.storages,
            self.program.nodes,
            steps,
            keep=self.program.kept,
            link=self.below.link,
            disk=self.below.disk.link if self.below.disk else None,
            start=state,
            staging_bytes=self.below.staging_for(len({s.storage for s in steps if s.kind == "reload"})),
            host_room_bytes=self.below.capacity_bytes if self.below.home == "host" else None,
            disk_room_bytes=self.below.disk_room_bytes,
            cpu_update_s={n.node: self.cpu_update_s(n) for n in self.program.nodes if n.phase == "update"},
        )

    def shifted(self, plan: OffloadPlan, budget_bytes: int) -> OffloadPlan:
        """The plan with its copies hidden as well as the budget allows."""
        if plan.hidden:
            return plan

        def judge(steps: Sequence[Step]) -> Outcome | None:
            try:
                return self._judge(steps, plan.state)
            except IllegalPlanError:
                return None

        touched = {n.node: frozenset({*n.reads, *n.mutates}) for n in self.program.nodes if n.phase == "update"}
        steps, outcome = shift(plan.steps, plan.outcome, self.program.nbytes, budget_bytes, judge, touched)
        return replace(plan, steps=steps, outcome=outcome, hidden=True)

    def fixed(self) -> Iterator[OffloadPlan]:
        """The fixed policies that offload everything, with the fastest and the leanest options."""
        blocks = self.chain.chain_blocks
        fastest = [min(range(len(b.options)), key=lambda o: (b.options[o].time_s, o)) for b in blocks]
        for executions in (self.executions(fastest), self.leanest()):
            yield from self.streaming(executions)

    def leanest(self) -> list[Execution]:
        """Every block once, with the option that keeps least for backward."""
        blocks = self.chain.chain_blocks
        chosen = [min(range(len(b.options)), key=lambda o: (b.options[o].save_bytes, o)) for b in blocks]
        return self.executions(chosen)

    def cpu_update_s(self, node: ComputeNode) -> float:
        """Seconds of an update node on the CPU: it reads gradient, weight and states, and writes the last two; a
        gradient that is clipped is read and written once more before."""
        if not self.below.cpu_update_bytes_per_s or not self.program.pinned.isdisjoint(node.mutates):
            return math.inf
        if not all(can_move(self.program.storages[s].name) for s in node.mutates):
            return math.inf  # it keeps something on the device
        sizes = self.program.nbytes
        written = sum(sizes[s] for s in node.mutates)
        read = sum(sizes[s] for s in node.reads if s not in node.mutates)
        clipping = 2 * read if self.late.intersection(node.reads) else 0
        return (2 * written + read + clipping) / self.below.cpu_update_bytes_per_s

    def executions(self, options: Sequence[int], on_cpu: frozenset[int] = frozenset()) -> list[Execution]:
        """Every block once, with the given options, but for update nodes `on_cpu`."""
        count = len(options)
        forward = [ChainStep("forward", b, options[b]) for b in range(count)]
        backward = [ChainStep("backward", b, options[b]) for b in reversed(range(count))]
        whole = self.program.without_dead(self.chain.executions([*forward, *backward]))
        return [e for e in whole if e.node not in on_cpu]

    def streaming(self, executions: Sequence[Execution]) -> Iterator[OffloadPlan]:
        """Everything movable streams, with more and more look-ahead."""
        needs = self.needs(executions)
        for ahead, lag in ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2)):
            if ahead + lag >= len(needs):
                return
            moves, below = stream_everything(needs, ahead=ahead, lag=lag)
            try:
                yield self.plan(f"stream_{ahead}_{lag}", executions, moves, below)
            except IllegalPlanError:
                continue
