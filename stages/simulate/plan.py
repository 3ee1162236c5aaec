"""The referee for a whole plan: legality, memory and time by plain replay. Shares no code with any solver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stowage.stages.ir.errors import STAGING, IllegalPlanError, Occupant
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, Link, TierState
from stowage.stages.ir.plan import PlanAction, PlanRow
from stowage.stages.ir.sums import taken_memory
from stowage.stages.ir.trace import Storage
from stowage.stages.simulate.copies import Copies
from stowage.stages.simulate.timing import MOVES, Timing

RANDOM_STATE_BYTES = 5056
"""Size of a saved state of the CPU generator (mt19937), kept for each random node that runs again; while it
does, the generator's present one is kept too."""

NO_LINK = Link(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Step:
    """One action before it is timed.

    Attributes:
        node: to compute, or -1; of an `update` the update's node.
        storage: what `action` is done with, or -1; of an `update` the parameter.
        label: of the step, for people.
        action: what is done with `storage`.
    """

    node: int
    storage: int
    label: str
    action: PlanAction = "free"

    @cached_property
    def kind(self) -> PlanAction:
        """The action; with a node it is `compute`."""
        return "compute" if self.node >= 0 and self.action != "update" else self.action


@dataclass(frozen=True)
class Outcome:
    """What a plan does.

    Attributes:
        rows: the plan with predicted times and bytes.
        peak_bytes: highest device bytes, everything included.
        peak_row: the row at which it is reached.
        baseline_bytes: on the device between iterations: persistent storages, and gradients that wait.
        time_s: of one iteration after another.
        once_time_s: time of all nodes executed once: a lower bound.
        recomputed_bytes: bytes of distinct activations (forward makes, backward reads) that were made more than once.
        activation_bytes: bytes of storages that forward makes and backward reads.
        occupants: what is in memory at the peak, largest first.
        below_bytes: bytes of distinct storages that were copied down at some time.
        disk_bytes: of those, what lives on a disk.
        offload_bytes, reload_bytes: moved in one iteration.
        wait_s: time that computing waits for copies.
    """

    rows: list[PlanRow]
    peak_bytes: int
    peak_row: int
    baseline_bytes: int
    time_s: float
    once_time_s: float
    recomputed_bytes: int
    activation_bytes: int
    occupants: list[Occupant]
    below_bytes: int = 0
    offload_bytes: int = 0
    reload_bytes: int = 0
    wait_s: float = 0.0
    disk_bytes: int = 0


def baseline_bytes(storages: Sequence[Storage]) -> int:
    """Bytes of everything that is in memory before an iteration that offloads nothing."""
    return sum(s.nbytes for s in storages if s.role != "temporary")


def replay_plan(
    storages: Sequence[Storage],
    nodes: Sequence[ComputeNode],
    steps: Iterable[Step],
    *,
    keep: frozenset[int] = frozenset(),
    budget_bytes: int | None = None,
    link: Link | None = None,
    disk: Link | None = None,
    start: TierState = EVERYTHING_ON_DEVICE,
    staging_bytes: int = 0,
    cpu_update_s: Mapping[int, float] | None = None,
    host_room_bytes: int | None = None,
    disk_room_bytes: int | None = None,
) -> Outcome:
    """Replay a plan.

    Args:
        storages, nodes: the program.
        steps: the plan.
        keep: storages that must exist at the end, in memory or below, and may be freed otherwise: temporary ones (the
            loss, gradients left in `.grad`), and gradients that were waiting and go on waiting.
        budget_bytes: reject the plan if any row exceeds it.
        link: to the tier below the device; needed by plans that offload.
        disk: between the host and the disk behind it, if there is one; what lives there takes both links.
        start: where persistent storages are between iterations, and what lives on a disk.
        staging_bytes: device memory that the tier below needs for itself, all the time.
        cpu_update_s: seconds of update nodes on the CPU; needed by plans that update below.
        host_room_bytes, disk_room_bytes: reject the plan if what lives there needs more; in the host also the largest
            update of what lives on the disk, which is read there.

    Raises:
        IllegalPlanError: at the first row that reads what is not in memory or no longer what it was, makes what is
            still in memory, loses what has no copy, touches what a copy is using, runs a run-once node again, draws
            first random numbers out of order, or exceeds the budget; or when what is below has no room there, nodes
            never ran or the end is not the start.
    """
    replay = _Replay(storages, nodes, list(steps), keep, budget_bytes, start, staging_bytes)
    replay.run()
    below, on_disk = replay.room_below(host_room_bytes, disk_room_bytes)
    timing = Timing(storages, nodes, replay.steps, Copies(link or NO_LINK, disk), start, cpu_update_s or {})
    rows = [r.timed(*times) for r, times in zip(replay.rows, timing.times, strict=True)]
    moved = {kind: sum(storages[s.storage].nbytes for s in replay.steps if s.kind == kind) for kind in MOVES}
    return Outcome(
        rows=rows,
        peak_bytes=replay.peak,
        peak_row=replay.peak_row,
        baseline_bytes=replay.base,
        time_s=timing.period_s,
        once_time_s=sum(n.time_s for n in nodes),
        recomputed_bytes=sum(storages[s].nbytes for s in replay.again & replay.activations),
        activation_bytes=sum(storages[s].nbytes for s in replay.activations),
        occupants=replay.occupants(),
        below_bytes=below,
        offload_bytes=moved["offload"],
        reload_bytes=moved["reload"],
        wait_s=timing.wait_s,
        disk_bytes=on_disk,
    )


class _Row(NamedTuple):
    """A row of the plan that is not timed yet."""

    row: int
    action: PlanAction
    node: int
    storage: int
    block: int
    step: str
    recompute: bool
    resident_bytes: int
    peak_bytes: int

    def timed(self, start_s: float, end_s: float) -> PlanRow:
        return PlanRow(*self[:7], start_s, end_s, self.resident_bytes, self.peak_bytes)


class _Replay:
    """Legality and memory, row by row."""

    def __init__(
        self,
        storages: Sequence[Storage],
        nodes: Sequence[ComputeNode],
        steps: list[Step],
        keep: frozenset[int],
        budget_bytes: int | None,
        start: TierState,
        staging_bytes: int,
    ) -> None:
        self.storages = storages
        self.nodes = nodes
        self.steps = steps
        self.keep = keep
        self.budget_bytes = budget_bytes
        self.start = start
        self.size = [s.nbytes for s in storages]
        self.temporary = [s.role == "temporary" for s in storages]
        moved = {s.storage for s in steps if s.kind in MOVES}
        self.tiered = moved | start.below | start.reloading | start.copied
        # Gradients that wait when the iteration starts and that its updates use up.
        self.spent = {s.storage for s in storages if s.role == "gradient"} - keep
        rows = ((s.node if s.kind == "compute" else -1, s.storage if s.kind == "free" else -1) for s in steps)
        self.taken = taken_memory(nodes, rows, self.tiered)
        self.live = {s.storage for s in storages if s.role != "temporary"} - start.below
        self.reloading = set(start.reloading)
        self.offloading = set(start.offloading)
        self.copied = set(start.copied)
        parameters = {s.storage for s in storages if s.role == "parameter"}
        self.update_of = {s: n for n in nodes if n.phase == "update" for s in parameters.intersection(n.mutates)}
        self.updates = {n.node for n in self.update_of.values()}
        self.together_bytes = 0
        """Workspaces of the updates right before, which are one call of the optimizer with this one."""
        self.readers = Counter(s for n in self.update_of.values() for s in n.reads)
        self.updating = set(start.updating)
        self.in_use = Counter(s for parameter in start.updating for s in self.update_of[parameter].reads)
        self.ever_below = set(start.below | start.reloading | start.copied | start.offloading)
        self.runs = [0] * len(nodes)
        self.total_runs = [0] * len(nodes)
        for step in steps:
            if step.node >= 0:
                self.total_runs[step.node] += 1
        self.version: dict[int, int] = {}
        self.seen: dict[int, dict[int, int]] = {}
        self.made: set[int] = set()
        self.again: set[int] = set()
        self.random_seen = -1
        self.staging_bytes = staging_bytes
        self.base = self.used = staging_bytes + sum(self.size[s] for s in self.live)
        self.peak, self.peak_row, self.at_peak = self.base, 0, set(self.live)
        self.rows: list[_Row] = []
        backward_reads = {s for n in nodes if n.phase != "forward" for s in n.reads}
        self.activations = {s for n in nodes if n.phase == "forward" for s in n.creates} & backward_reads

    def run(self) -> None:
        """All rows, then the end."""
        act = {"free": self._free, "offload": self._offload, "reload": self._reload, "wait": self._wait}
        for number, step in enumerate(self.steps):
            where = f"row {number} ({step.label})"
            if step.kind != "compute" or step.node not in self.updates:
                self.together_bytes = 0
            if step.kind == "compute":
                self._compute(number, step, where)
                continue
            if step.kind == "update":
                self._update(number, step, where)
                continue
            act[step.kind](step.storage, f"{where} {step.kind} of {self.storages[step.storage].name}:")
            if step.kind == "reload":
                self._reach(number, self.used, where)
            self.rows.append(_Row(number, step.kind, -1, step.storage, -1, step.label, False, self.used, self.used))
        self._end()

    def _reach(self, number: int, high: int, where: str) -> None:
        if high > self.peak:
            self.peak, self.peak_row, self.at_peak = high, number, self.live - {self.taken.get(number, -1)}
        if self.budget_bytes is not None and high > self.budget_bytes:
            raise IllegalPlanError(f"{where} needs {high} bytes, above the budget of {self.budget_bytes}")

    def _free(self, storage: int, where: str) -> None:
        if storage not in self.live:
            raise IllegalPlanError(f"{where} it is not in memory")
        if storage in self.reloading or storage in self.offloading:
            raise IllegalPlanError(f"{where} a copy is still using it")
        if not self.temporary[storage] and storage not in self.spent and storage not in self.copied:
            raise IllegalPlanError(f"{where} it has no copy below that is up to date")
        self.live.discard(storage)
        self.used -= self.size[storage]

    def _offload(self, storage: int, where: str) -> None:
        if storage not in self.live or storage in self.reloading:
            raise IllegalPlanError(f"{where} it is not in memory")
        if storage in self.offloading:
            raise IllegalPlanError(f"{where} it is already on its way")
        if self.in_use[storage]:
            raise IllegalPlanError(f"{where} an update below is still reading it")
        self.offloading.add(storage)
        self.ever_below.add(storage)

    def _reload(self, storage: int, where: str) -> None:
        if storage in self.live:
            raise IllegalPlanError(f"{where} it is still in memory")
        if storage not in self.copied:
            raise IllegalPlanError(f"{where} it has no copy below")
        self.live.add(storage)
        self.reloading.add(storage)
        self.used += self.size[storage]

    def _wait(self, storage: int, where: str) -> None:
        if storage in self.reloading:
            self.reloading.discard(storage)
        elif storage in self.offloading:
            self.offloading.discard(storage)
            self.copied.add(storage)
        elif storage in self.updating:
            self.updating.discard(storage)
            self.in_use.subtract(self.update_of[storage].reads)
            self.copied |= self.tiered.intersection(self.update_of[storage].mutates)
        else:
            raise IllegalPlanError(f"{where} nothing is under way for it")

    def _update(self, number: int, step: Step, where: str) -> None:
        node = self.nodes[step.node]
        where = f"{where} update of {node.name} below"
        if self.runs[node.node]:
            raise IllegalPlanError(f"{where} runs again")
        for storage in {*node.reads, *node.mutates}:
            name = self.storages[storage].name
            if storage not in self.tiered and self.storages[storage].role == "state":
                continue  # a counter, say: too small to have a place below
            if storage not in self.copied:
                raise IllegalPlanError(f"{where} needs {name}, which has no copy below that is up to date")
            if storage in self.live and storage in node.mutates:
                raise IllegalPlanError(f"{where} leaves an old {name} on the device")
        for storage in node.mutates:
            self.version[storage] = self.version.get(storage, 0) + 1
        self.copied -= set(node.mutates)
        # Its gradient is clipped where it is; the scale serves other updates too.
        self.copied -= {s for s in node.reads if self.readers[s] == 1}
        self.updating.add(step.storage)
        self.in_use.update(node.reads)
        self.runs[node.node] += 1
        self.rows.append(
            _Row(number, "update", node.node, step.storage, node.block, step.label, False, self.used, self.used)
        )

    def _compute(self, number: int, step: Step, where: str) -> None:
        node = self.nodes[step.node]
        where = f"{where} node {node.name}"
        first = self.runs[node.node] == 0
        for storage in [*node.reads, *node.mutates]:
            if storage not in self.live or storage in self.reloading:
                raise IllegalPlanError(f"{where} reads {self.storages[storage].name}, not in memory")
        current = {s: self.version.get(s, 0) for s in node.reads if not self.temporary[s] and s not in node.mutates}
        if first:
            self.seen[node.node] = current
        elif self.seen[node.node] != current:
            raise IllegalPlanError(f"{where} runs again after something it reads was updated")
        if node.once and not first:
            raise IllegalPlanError(f"{where} may run only once")
        if node.random and first:
            if node.node < self.random_seen:
                raise IllegalPlanError(f"{where} draws random numbers out of order")
            self.random_seen = node.node
            if self.total_runs[node.node] > 1:
                self.used += RANDOM_STATE_BYTES
        for storage in node.creates:
            if storage in self.live:
                raise IllegalPlanError(f"{where} makes {self.storages[storage].name}, still in memory")
            self.live.add(storage)
            self.copied.discard(storage)
            self.used += self.size[storage]
            if storage in self.made and node.phase == "forward":
                self.again.add(storage)
            self.made.add(storage)
        for storage in node.mutates:
            if storage in self.offloading:
                raise IllegalPlanError(f"{where} changes {self.storages[storage].name} while it is copied")
            if first:
                self.version[storage] = self.version.get(storage, 0) + 1
                self.copied.discard(storage)
        self.runs[node.node] += 1
        # What the result is written over is its memory now, though the plan frees that in a row of its own.
        taken_bytes = self.size[self.taken[number]] if number in self.taken else 0
        high = self.used - taken_bytes + node.workspace_bytes + self.together_bytes
        if node.node in self.updates:
            self.together_bytes += node.workspace_bytes
        if node.random and not first:
            high += RANDOM_STATE_BYTES  # the generator is put back afterwards
        self._reach(number, high, where)
        if node.random and not first and self.runs[node.node] == self.total_runs[node.node]:
            self.used -= RANDOM_STATE_BYTES
        self.rows.append(
            _Row(number, "compute", node.node, -1, node.block, step.label, not first, self.used - taken_bytes, high)
        )

    def _end(self) -> None:
        never = [n.name for n in self.nodes if not self.runs[n.node]]
        if never:
            raise IllegalPlanError(f"{len(never)} nodes never run, such as {never[0]}")
        persistent = {s.storage for s in self.storages if s.role != "temporary"} - self.spent
        may_go = {s.storage for s in self.storages if s.role == "temporary"} | self.spent
        waits_below = self.keep & self.copied - self.live
        wrong = (self.live & may_go) ^ (self.keep & may_go - waits_below)
        if wrong:
            names = [self.storages[s].name for s in sorted(wrong)]
            raise IllegalPlanError(f"the iteration ends with the wrong storages in memory: {names[:5]}")
        ends = (persistent - self.live, self.reloading, self.offloading)
        starts = (self.start.below - self.spent, self.start.reloading, self.start.offloading)
        differing = [a ^ b for a, b in zip(ends, starts)]
        differing.append(self.updating ^ self.start.updating)
        differing.append(set(self.start.copied) - self.copied - self.spent)
        for names in ([self.storages[s].name for s in sorted(d)] for d in differing):
            if names:
                raise IllegalPlanError(f"the iteration does not end as it starts: {names[:5]}")

    def room_below(self, host_bytes: int | None, disk_bytes: int | None) -> tuple[int, int]:
        """Bytes that live below, and those of them that live on a disk."""
        there = self.start.on_disk
        on_disk = sum(self.size[s] for s in self.ever_below & there)
        host = sum(self.size[s] for s in self.ever_below - there)
        read = (self.nodes[s.node].mutates for s in self.steps if s.kind == "update")
        host += max((sum(self.size[s] for s in there.intersection(storages)) for storages in read), default=0)
        for where, needed, room in (("host", host, host_bytes), ("disk", on_disk, disk_bytes)):
            if room is not None and needed > room:
                raise IllegalPlanError(f"what lives in the {where} needs {needed} bytes, and {room} are there")
        return sum(self.size[s] for s in self.ever_below), on_disk

    def occupants(self) -> list[Occupant]:
        """What is in memory at the peak."""
        found = [Occupant(self.storages[s].name, self.size[s]) for s in self.at_peak]
        if self.staging_bytes:
            found.append(Occupant(STAGING, self.staging_bytes))
        if self.rows and (node := self.rows[self.peak_row].node) >= 0 and self.nodes[node].workspace_bytes:
            found.append(Occupant(f"workspace of {self.nodes[node].name}", self.nodes[node].workspace_bytes))
        return sorted(found, key=lambda o: (-o.nbytes, o.name))
