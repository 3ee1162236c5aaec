"""Writes the lines of a plan's actions: one method and one entry of `LINES` for each action."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stowage.stages.codegen.calls import Calls
from stowage.stages.codegen.guarding import Guarding
from stowage.stages.codegen.names import Identifiers
from stowage.stages.ir.actions import ACTIONS, PlanAction
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow, Slot
from stowage.stages.ir.source import quoted, remark
from stowage.stages.ir.sums import taken_memory, written_over
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.units import ALWAYS, Unit
from stowage.stages.ir.updates import ADD, UPDATE, left_behind, taken_gradients, updated_parameter


class Actions:
    """Writes the rows of one plan, in their order.

    Attributes:
        names: the text so far.
        left: gradients that still have to be left in `.grad` at the end: storage -> parameter.
    """

    def __init__(
        self,
        trace: TraceTables,
        nodes: Sequence[ComputeNode],
        rows: Sequence[PlanRow],
        slots: Sequence[Slot],
        units: Sequence[Unit] = (),
    ) -> None:
        self.trace = trace
        self.nodes = nodes
        self.rows = rows
        self.names = Identifiers(trace)
        self._calls = Calls(trace, self.names)
        self.guarding = Guarding(trace, nodes, rows, units, self.names)
        self.runs = [0] * len(nodes)
        self.total = [0] * len(nodes)
        self.slots = {s.storage: s for s in slots}
        self.on_disk = (
            {s.storage for s in slots if s.placement == "disk"} if len({s.placement for s in slots}) > 1 else set()
        )
        self.under_way = {s.storage: s.start for s in slots if s.start in ("reloading", "offloading", "updating")}
        behind = left_behind(trace)
        stays = [g for g in trace.gradients if g.gradient_value in behind]
        self.left = {trace.values[g.gradient_value].storage: g.parameter for g in stays}
        self.left_value = {trace.values[g.gradient_value].storage: g.gradient_value for g in stays}
        self.reloaded = {r.storage for r in rows if r.action == "reload"}
        self.spent: set[int] = set()
        self.collecting: dict[int, Call] = {}
        """Collectives under way, by the first storage that they create."""
        moved = {r.storage for r in rows if ACTIONS[r.action].transfers} | self.slots.keys()
        pairs = ((r.node if r.action == "compute" else -1, r.storage if r.action == "free" else -1) for r in rows)
        self.taken = taken_memory(nodes, pairs, moved)
        for row in rows:
            if row.node >= 0:
                self.total[row.node] += 1

    def write(self, row: PlanRow) -> None:
        """Write the lines of a row."""
        with self.guarding.row(row):
            LINES[row.action](self, row)

    def is_update(self, row: PlanRow) -> bool:
        """Return whether a row is the update of one parameter on the device."""
        calls = self.nodes[row.node].calls if row.action == "compute" else ()
        return [self.trace.calls[c].target for c in calls] == [UPDATE]

    def kind(self, row: PlanRow) -> tuple[bool, int]:
        """Return whether a row is an update on the device, and if so its guard: equal ones may be together."""
        update = self.is_update(row)
        return update, self.guarding.guard(row) if update else ALWAYS

    def compute(self, row: PlanRow) -> None:
        """Write the lines of `compute`."""
        node = self.nodes[row.node]
        again = self.runs[row.node] > 0
        self.runs[row.node] += 1
        nbytes = sum(self.trace.storages[s].nbytes for s in node.creates)
        late = "end" if node.phase == "update" else "shared"
        where = late if node.block < 0 else f"block {node.block}"
        note = f"  # {where}, {nbytes / MIB:.1f} MiB, {node.time_s * 1e3:.2f} ms{', again' if again else ''}"
        calls = [self.guarding.with_flags(self.trace.calls[c], row) for c in node.calls]
        if row.row in self.taken:
            calls = [written_over(calls[0], self.taken[row.row], self.trace)]
        if not node.random or self.total[row.node] == 1:
            for i, call in enumerate(calls):
                self._call(call, row, again, note if i == len(calls) - 1 else "")
            self._gradients_changed(node)
            return
        own = set(node.creates)
        for read in (v for call in calls for v in call.reads):
            if self.trace.values[read].storage not in own:
                self.names.ensure(read)
        self.names.lines.append(f"with run.random.{'replay' if again else 'record'}({node.node}):")
        start = len(self.names.lines)
        for i, call in enumerate(calls):
            self._calls.call(call, again, note if i == len(calls) - 1 else "")
        self.names.lines[start:] = ["    " + line for line in self.names.lines[start:]]
        if again and self.runs[row.node] == self.total[row.node]:
            self.names.lines.append(f"run.random.forget({node.node})")

    def _call(self, call: Call, row: PlanRow, again: bool, note: str) -> None:
        """Write a call, under its own guard where it has one."""
        guard = self.guarding.of_call(call, row)
        if guard & ALWAYS:
            self._calls.call(call, again, note)
            return
        self.names.ensure(call.reads[0])  # what it writes is there in every run of the row
        with self.guarding.under(guard):
            self._calls.call(call, again, note)

    def updates(self, rows: Sequence[PlanRow]) -> None:
        """Write updates of the same guard with nothing between as one step of the optimizer, a line a gradient."""
        with self.guarding.under(self.guarding.guard(rows[0])):
            self._updates(rows)

    def _updates(self, rows: Sequence[PlanRow]) -> None:
        calls = [self.trace.calls[c] for row in rows for c in self.nodes[row.node].calls]
        for read in (v for call in calls for v in call.reads):
            self.names.ensure(read)
        lines = [f"    {quoted(updated_parameter(c.arguments)[0])}: {self.names.name(c.reads[0])}," for c in calls]
        scale = "".join(f", {self.names.name(v)}" for v in calls[0].reads[2:])
        time_s = sum(self.nodes[row.node].time_s for row in rows)
        note = f"  # {len(rows)} updates, {time_s * 1e3:.2f} ms"
        self.names.lines += [
            "gradients = {",
            *lines,
            "}",
            f"run.update_together(gradients{scale}){note}",
            "del gradients",
        ]
        for row in rows:
            self.runs[row.node] += 1
            self._gradients_changed(self.nodes[row.node])

    def free(self, row: PlanRow) -> None:
        """Write the lines of `free`."""
        self.names.forget(row.storage)
        role = self.trace.storages[row.storage].role
        slot = self.slots.get(row.storage)
        if role == "temporary" and slot is not None and slot.role == "gradient":
            self.names.lines.append(f"run.keep_offloaded({quoted(self.left[row.storage])})")
            del self.left[row.storage]
        elif role != "temporary" and row.storage not in self.spent:
            self.names.lines.append(f"run.free({self._slot(row)})")

    def offload(self, row: PlanRow) -> None:
        """Write the lines of `offload`."""
        slot = self.slots[row.storage]
        self.under_way[row.storage] = "offloading"
        where = " to disk" if row.storage in self.on_disk else ""
        note = f"  # {slot.nbytes / MIB:.1f} MiB down{where}, {(row.end_s - row.start_s) * 1e3:.1f} ms"
        if self.trace.storages[row.storage].role != "temporary":
            self.names.lines.append(f"run.offload({self._slot(row)}){note}")
            return
        value_id = self.names.base_of[row.storage]
        if slot.role == "gradient" and row.storage not in self.reloaded:
            value_id = self.left_value.get(row.storage, value_id)  # it waits in `.grad`, in the form that it has there
        self.names.ensure(value_id)
        self.names.lines.append(f"run.offload({self._slot(row)}, {self.names.name(value_id)}){note}")

    def reload(self, row: PlanRow) -> None:
        """Write the lines of `reload`."""
        self.under_way[row.storage] = "reloading"
        where = " from disk" if row.storage in self.on_disk else ""
        note = f"  # {self.slots[row.storage].nbytes / MIB:.1f} MiB up{where}, {(row.end_s - row.start_s) * 1e3:.1f} ms"
        self.names.lines.append(f"run.reload({self._slot(row)}){note}")

    def wait(self, row: PlanRow) -> None:
        """Write the lines of `wait`."""
        if row.storage in self.collecting:
            call = self.collecting.pop(row.storage)
            self._calls.end(call, f"  # without: {self._next_reader(row)} would read it before it is here")
            return
        if self.under_way.get(row.storage) == "updating":
            del self.under_way[row.storage]
            self.names.lines.append(f"run.wait({self._slot(row)})  # without: its old value would be reloaded")
            return
        reloading = self.under_way.pop(row.storage) == "reloading"
        text = f"run.wait({self._slot(row)})"
        if reloading and self.trace.storages[row.storage].role == "temporary":
            base = self.names.base_of[row.storage]
            text = f"{self.names.name(base)} = {text}"
            self.names.define(base)
        if reloading:
            why = f"{self._next_reader(row)} would read it before it is here"
        else:
            why = "its memory would be changed or freed while it is copied"
        self.names.lines.append(f"{text}  # without: {why}")

    def update(self, row: PlanRow) -> None:
        """Write the line of `update`, by the CPU on what is in the lower tier."""
        call = self.trace.calls[self.nodes[row.node].calls[0]]
        taken = (call.reads[0], *call.reads[2:])  # the gradient, and the scale that clips it
        names = ", ".join(quoted(self.slots[self.trace.values[v].storage].name) for v in taken)
        names += self._form(call.reads[0])
        self.under_way[row.storage] = "updating"
        where = ", from and to disk" if row.storage in self.on_disk else ""
        note = f"  # on the CPU{where}, {(row.end_s - row.start_s) * 1e3:.1f} ms"
        self.names.lines.append(f"run.update_on_cpu({self._slot(row)}, {names}){note}")

    def collective(self, row: PlanRow) -> None:
        """Write the line of `gather` and `scatter`, which start a collective."""
        node = self.nodes[row.node]
        (call,) = (self.trace.calls[c] for c in node.calls)
        nbytes = sum(self.trace.storages[s].nbytes for s in node.creates)
        again = ", again" if self.runs[row.node] else ""
        self.runs[row.node] += 1
        self.collecting[row.storage] = call
        self._calls.start(call, f"  # {nbytes / MIB:.1f} MiB, {(row.end_s - row.start_s) * 1e3:.1f} ms{again}")
        self._gradients_changed(node)

    def _form(self, gradient: int) -> str:
        """Return how a gradient lies in the offloaded storage, where it is a view of that."""
        v = self.trace.values[gradient]
        base = self.trace.values[self.names.base_of[v.storage]]
        if (v.shape, v.stride, v.offset) == (base.shape, base.stride, base.offset):
            return ""
        return f", form=({list(v.shape)}, {list(v.stride)}, {v.offset - base.offset})"

    def _gradients_changed(self, node: ComputeNode) -> None:
        """Note waiting gradients that a node uses up, and write which offloaded copies it puts out of date."""
        storages = self.trace.storages
        taken = taken_gradients(c for c in map(self.trace.calls.__getitem__, node.calls) if c.target != ADD)
        updates = {self.trace.values[v].storage for v in taken}
        self.spent |= {s for s in updates if storages[s].role == "gradient"}
        for storage in node.mutates:
            if storages[storage].role == "gradient" and storage in self.slots:
                self.names.lines.append(f"run.changed({quoted(self.slots[storage].name)})")

    def _slot(self, row: PlanRow) -> str:
        return quoted(self.slots[row.storage].name)

    def _next_reader(self, row: PlanRow) -> str:
        for later in self.rows[row.row + 1 :]:
            if later.node >= 0:
                node = self.nodes[later.node]
                if row.storage in node.reads or row.storage in node.mutates:
                    return remark(node.name)
        return "the next iteration"


LINES: dict[PlanAction, Callable[[Actions, PlanRow], None]] = {
    "compute": Actions.compute,
    "free": Actions.free,
    "wait": Actions.wait,
    "offload": Actions.offload,
    "reload": Actions.reload,
    "update": Actions.update,
    "gather": Actions.collective,
    "scatter": Actions.collective,
}
"""The method that writes each action."""
