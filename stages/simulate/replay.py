"""Replays legality and memory of a plan, row by row: the rules of the referee, one for each action."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stowage.stages.ir.actions import ACTIONS, PlanAction
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.step import Step
from stowage.stages.ir.sums import taken_memory
from stowage.stages.ir.trace import Storage

RANDOM_STATE_BYTES = 5056
"""Size of a saved state of the CPU generator (mt19937), kept for each random node that runs again.

While such a node runs again, the generator's present state is kept too.
"""


class Row(NamedTuple):
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
        """Return the row with its times."""
        return PlanRow(*self[:7], start_s, end_s, self.resident_bytes, self.peak_bytes)


class Replay:
    """Replays a plan for legality and memory; `RULES` has the rule of each action."""

    def __init__(
        self,
        storages: Sequence[Storage],
        nodes: Sequence[ComputeNode],
        steps: list[Step],
        keep: frozenset[int],
        budget_bytes: int | None,
        start: TierState,
        staging_bytes: int,
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        self.storages = storages
        self.nodes = nodes
        self.steps = steps
        self.keep = keep
        self.skipped = skipped
        self.budget_bytes = budget_bytes
        self.start = start
        self.size = [s.nbytes for s in storages]
        self.temporary = [s.role == "temporary" for s in storages]
        moved = {s.storage for s in steps if ACTIONS[s.kind].transfers}
        self.tiered = moved | start.offloaded | start.reloading | start.copied
        # Gradients that wait when the iteration starts and that its updates use up.
        self.spent = {s.storage for s in storages if s.role == "gradient"} - keep
        rows = ((s.node if s.kind == "compute" else -1, s.storage if s.kind == "free" else -1) for s in steps)
        self.taken = taken_memory(nodes, rows, self.tiered)
        self.live = {s.storage for s in storages if s.role != "temporary"} - start.offloaded
        self.reloading = set(start.reloading)
        self.offloading = set(start.offloading)
        self.copied = set(start.copied)
        parameters = {s.storage for s in storages if s.role == "parameter"}
        self.update_of = {s: n for n in nodes if n.phase == "update" for s in parameters.intersection(n.mutates)}
        self.updates = {n.node for n in self.update_of.values()}
        self.together_bytes = 0
        """Workspaces of the updates right before, which are one call of the optimizer with this one."""
        self.readers = Counter(s for n in self.update_of.values() for s in n.reads)
        self.arriving: dict[int, ComputeNode] = {}
        """Collectives under way, by the first storage that they create."""
        self.written: set[int] = set()
        """What they create."""
        self.collected: Counter[int] = Counter()
        """How many of them read or create each storage."""
        self.changes: dict[int, list[int]] = {}
        """The nodes that run and change each storage that lasts, in their order."""
        for n in nodes:
            for storage in n.mutates if n.node not in skipped else ():
                if not self.temporary[storage]:
                    self.changes.setdefault(storage, []).append(n.node)
        self.updating = set(start.updating)
        self.in_use = Counter(s for parameter in start.updating for s in self.update_of[parameter].reads)
        self.ever_offloaded = set(start.offloaded | start.reloading | start.copied | start.offloading)
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
        self.rows: list[Row] = []
        backward_reads = {s for n in nodes if n.phase != "forward" for s in n.reads}
        self.activations = {s for n in nodes if n.phase == "forward" for s in n.creates} & backward_reads

    def run(self) -> None:
        """Replay all rows, then check the end."""
        for number, step in enumerate(self.steps):
            if step.kind != "compute" or step.node not in self.updates:
                self.together_bytes = 0
            RULES[step.kind](self, number, step)
        self._end()

    def note(self, number: int, step: Step) -> None:
        """Add a row after its effect."""
        kind = ACTIONS[step.kind]
        if kind.takes_device_memory:
            self.reach(number, step, self.used)
        node, block = (step.node, self.nodes[step.node].block) if kind.on_node else (-1, -1)
        row = Row(number, step.kind, node, step.storage, block, step.label, False, self.used, self.used)
        self.rows.append(row)

    def reach(self, number: int, step: Step, high: int) -> None:
        """Check the budget and the peak, when so many bytes are on the device at once."""
        if high > self.peak:
            self.peak, self.peak_row, self.at_peak = high, number, self.live - {self.taken.get(number, -1)}
        if self.budget_bytes is not None and high > self.budget_bytes:
            raise self.wrong(number, step, f"needs {high} bytes, above the budget of {self.budget_bytes}")

    def wrong(self, number: int, step: Step, text: str) -> IllegalPlanError:
        """Return the error of a row, which says where it is, what it does, and what is wrong with it."""
        if step.kind == "compute":
            deed = f"node {self.nodes[step.node].name}"
        elif ACTIONS[step.kind].on_node:
            deed = f"{step.kind} of {self.nodes[step.node].name}"
        else:
            deed = f"{step.kind} of {self.storages[step.storage].name}:"
        return IllegalPlanError(f"row {number} ({step.label}) {deed} {text}")

    def free(self, number: int, step: Step) -> None:
        """Apply the rule of `free`."""
        storage = step.storage
        if storage not in self.live:
            raise self.wrong(number, step, "it is not in memory")
        if storage in self.reloading or storage in self.offloading:
            raise self.wrong(number, step, "a copy is still using it")
        if self.collecting(storage):
            raise self.wrong(number, step, "a collective is still using it")
        if not self.temporary[storage] and storage not in self.spent and storage not in self.copied:
            raise self.wrong(number, step, "it has no copy in the lower tier that is up to date")
        self.live.discard(storage)
        self.used -= self.size[storage]
        self.note(number, step)

    def offload(self, number: int, step: Step) -> None:
        """Apply the rule of `offload`."""
        storage = step.storage
        if storage not in self.live or storage in self.reloading:
            raise self.wrong(number, step, "it is not in memory")
        if storage in self.offloading:
            raise self.wrong(number, step, "it is already on its way")
        if self.in_use[storage]:
            raise self.wrong(number, step, "an update by the CPU is still reading it")
        if storage in self.written:
            raise self.wrong(number, step, "a collective is still writing it")
        self.offloading.add(storage)
        self.ever_offloaded.add(storage)
        self.note(number, step)

    def reload(self, number: int, step: Step) -> None:
        """Apply the rule of `reload`."""
        storage = step.storage
        if storage in self.live:
            raise self.wrong(number, step, "it is still in memory")
        if storage not in self.copied:
            raise self.wrong(number, step, "it has no copy in the lower tier")
        self.live.add(storage)
        self.reloading.add(storage)
        self.used += self.size[storage]
        self.note(number, step)

    def wait(self, number: int, step: Step) -> None:
        """Apply the rule of `wait`."""
        storage = step.storage
        if storage in self.reloading:
            self.reloading.discard(storage)
        elif storage in self.offloading:
            self.offloading.discard(storage)
            self.copied.add(storage)
        elif storage in self.updating:
            self.updating.discard(storage)
            self.in_use.subtract(self.update_of[storage].reads)
            self.copied |= self.tiered.intersection(self.update_of[storage].mutates)
        elif storage in self.arriving:
            self._arrived(number, step)
        else:
            raise self.wrong(number, step, "nothing is under way for it")
        self.note(number, step)

    def _arrived(self, number: int, step: Step) -> None:
        """End a collective: a scatter's buffer is freed, a gather copies its results out of one."""
        node = self.arriving.pop(step.storage)
        self.written.difference_update(node.creates)
        self.collected.subtract((*node.reads, *node.creates))
        if node.phase == "update":
            self.used -= node.workspace_bytes
        else:
            self.reach(number, step, self.used + node.workspace_bytes)

    def collecting(self, storage: int) -> bool:
        """Return whether a collective under way reads a storage or creates it."""
        return self.collected[storage] > 0

    def collective(self, number: int, step: Step) -> None:
        """Apply the rule of `gather` and `scatter`: the node runs, and nobody may touch its results until it ends."""
        node = self.nodes[step.node]
        if step.storage != node.creates[0] or node.mutates or node.random:
            raise self.wrong(number, step, "is no collective")
        self.compute(number, step)
        self.arriving[step.storage] = node
        self.written.update(node.creates)
        self.collected.update((*node.reads, *node.creates))
        if node.phase == "update":
            self.used += node.workspace_bytes  # the buffer of a scatter, until it ends
        block, again = node.block, self.rows.pop().recompute
        self.rows.append(
            Row(number, step.kind, node.node, step.storage, block, step.label, again, self.used, self.used)
        )

    def update(self, number: int, step: Step) -> None:
        """Apply the rule of `update`."""
        node = self.nodes[step.node]
        if self.runs[node.node]:
            raise self.wrong(number, step, "the CPU runs it again")
        for storage in {*node.reads, *node.mutates}:
            name = self.storages[storage].name
            if storage not in self.tiered and self.storages[storage].role == "state":
                continue  # a counter, for example: too small to have a slot
            if storage not in self.copied:
                raise self.wrong(
                    number, step, f"the CPU needs {name}, which has no copy in the lower tier that is up to date"
                )
            if storage in self.live and storage in node.mutates:
                raise self.wrong(number, step, f"the CPU leaves an old {name} on the device")
        self._finds_its_version(number, step, node)
        for storage in node.mutates:
            self.version[storage] = self.version.get(storage, 0) + 1
        self.copied -= set(node.mutates)
        # Its gradient is clipped where it is; the scale serves other updates too.
        self.copied -= {s for s in node.reads if self.readers[s] == 1}
        self.updating.add(step.storage)
        self.in_use.update(node.reads)
        self.runs[node.node] += 1
        self.note(number, step)

    def compute(self, number: int, step: Step) -> None:
        """Apply the rule of `compute`."""
        node = self.nodes[step.node]
        first = self.runs[node.node] == 0
        live, reloading, written = self.live, self.reloading, self.written
        for storage in (*node.reads, *node.mutates):
            if storage not in live or storage in reloading or storage in written:
                raise self.wrong(number, step, f"reads {self.storages[storage].name}, not in memory")
        version, temporary, mutates = self.version, self.temporary, node.mutates
        current = {s: version.get(s, 0) for s in node.reads if not temporary[s] and s not in mutates}
        if first:
            self.seen[node.node] = current
        elif self.seen[node.node] != current:
            raise self.wrong(number, step, "runs again after something it reads was updated")
        if first:
            self._finds_its_version(number, step, node)
        if node.once and not first:
            raise self.wrong(number, step, "may run only once")
        if node.random and first:
            if node.node < self.random_seen:
                raise self.wrong(number, step, "draws random numbers out of order")
            self.random_seen = node.node
            if self.total_runs[node.node] > 1:
                self.used += RANDOM_STATE_BYTES
        for storage in node.creates:
            if storage in live:
                raise self.wrong(number, step, f"makes {self.storages[storage].name}, still in memory")
            live.add(storage)
            self.copied.discard(storage)
            self.used += self.size[storage]
            if storage in self.made and node.phase == "forward":
                self.again.add(storage)
            self.made.add(storage)
        for storage in node.mutates:
            if storage in self.offloading or self.collecting(storage):
                raise self.wrong(number, step, f"changes {self.storages[storage].name} while it is copied")
            if first:
                self.version[storage] = self.version.get(storage, 0) + 1
                self.copied.discard(storage)
        self.runs[node.node] += 1
        # The result is written over this memory, though the plan frees the memory in a row of its own.
        taken_bytes = self.size[self.taken[number]] if number in self.taken else 0
        high = self.used - taken_bytes + node.workspace_bytes + self.together_bytes
        if node.node in self.updates:
            self.together_bytes += node.workspace_bytes
        if node.random and not first:
            high += RANDOM_STATE_BYTES  # the generator gets its state back afterwards
        self.reach(number, step, high)
        if node.random and not first and self.runs[node.node] == self.total_runs[node.node]:
            self.used -= RANDOM_STATE_BYTES
        self.rows.append(
            Row(number, step.kind, node.node, -1, node.block, step.label, not first, self.used - taken_bytes, high)
        )

    def _finds_its_version(self, number: int, step: Step, node: ComputeNode) -> None:
        """Check that a node finds what lasts as the nodes before it leave it: changed by each of them, and by no other.

        Where it runs for the first time nothing tells otherwise that a weight has been updated too early.
        """
        for storage in {*node.reads, *node.mutates}:
            changes = self.changes.get(storage)
            if changes is None:
                continue
            before, done = bisect_left(changes, node.node), self.version.get(storage, 0)
            if done != before:
                when = "after it was changed" if done > before else "before all is done to it that precedes"
                raise self.wrong(number, step, f"uses {self.storages[storage].name} {when}")

    def _end(self) -> None:
        never = [n.name for n in self.nodes if not self.runs[n.node] and n.node not in self.skipped]
        if never:
            raise IllegalPlanError(f"{len(never)} nodes never run, such as {never[0]}")
        persistent = {s.storage for s in self.storages if s.role != "temporary"} - self.spent
        may_go = {s.storage for s in self.storages if s.role == "temporary"} | self.spent
        waits_offloaded = self.keep & self.copied - self.live
        wrong = (self.live & may_go) ^ (self.keep & may_go - waits_offloaded)
        if wrong:
            names = [self.storages[s].name for s in sorted(wrong)]
            raise IllegalPlanError(f"the iteration ends with the wrong storages in memory: {names[:5]}")
        ends = (persistent - self.live, self.reloading, self.offloading)
        starts = (self.start.offloaded - self.spent, self.start.reloading, self.start.offloading)
        differing = [a ^ b for a, b in zip(ends, starts)]
        differing.append(self.updating ^ self.start.updating)
        differing.append(set(self.arriving))
        differing.append(set(self.start.copied) - self.copied - self.spent)
        for names in ([self.storages[s].name for s in sorted(d)] for d in differing):
            if names:
                raise IllegalPlanError(f"the iteration does not end as it starts: {names[:5]}")

    def room_in_lower_tier(self, host_bytes: int | None, disk_bytes: int | None) -> tuple[int, int]:
        """Return the bytes that are placed in the lower tier, and those of them that are placed on a disk."""
        there = self.start.on_disk
        on_disk = sum(self.size[s] for s in self.ever_offloaded & there)
        host = sum(self.size[s] for s in self.ever_offloaded - there)
        read = (self.nodes[s.node].mutates for s in self.steps if s.kind == "update")
        host += max((sum(self.size[s] for s in there.intersection(storages)) for storages in read), default=0)
        for where, needed, room in (("host", host, host_bytes), ("disk", on_disk, disk_bytes)):
            if room is not None and needed > room:
                raise IllegalPlanError(f"what lives in the {where} needs {needed} bytes, and {room} are there")
        return sum(self.size[s] for s in self.ever_offloaded), on_disk


RULES: dict[PlanAction, Callable[[Replay, int, Step], None]] = {
    "compute": Replay.compute,
    "free": Replay.free,
    "wait": Replay.wait,
    "offload": Replay.offload,
    "reload": Replay.reload,
    "update": Replay.update,
    "gather": Replay.collective,
    "scatter": Replay.collective,
}
"""The rule of each action: it raises `wrong` or changes what is in memory, and notes the row."""
