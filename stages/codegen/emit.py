"""Write `step.py` from the tables alone: one line an operation, deterministic."""

from __future__ import annotations

import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from stowage.stages.ir.arguments import render_arguments, split_receiver
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.operators import ALIKE, FUNCTIONS, METHODS, OPAQUE, SPREAD
from stowage.stages.ir.plan import PlanRow, PlanSummary, Slot
from stowage.stages.ir.results import grouped
from stowage.stages.ir.source import identifier, operator_name, quoted, remark, role_of
from stowage.stages.ir.sums import taken_memory, written_over
from stowage.stages.ir.trace import Call, TraceTables, base_values
from stowage.stages.ir.updates import (
    ADD,
    CLIP,
    UPDATE,
    UPDATE_ALL,
    jointly_updated,
    left_behind,
    taken_gradients,
    updated_parameter,
)

_HEADER = '''"""One training iteration of {model} on {device}.

Plan {plan}: {method}, device budget {budget:,.1f} MiB, predicted peak {peak:,.1f} MiB, predicted time {time:.3f} s.
Each line is one operation; the comment gives its block, the bytes it makes and its predicted time. `again` marks a
recomputation. `del` frees; `offload`, `reload` and `wait` move tensors to the tier below the device and back. Written
by codegen; change the plan, not this file.
"""

import torch
from torch import Tensor

from stowage.stages.runtime import Iteration

aten = torch.ops.aten


@torch.no_grad()
def step(run: Iteration) -> Tensor:
'''


NOTHING = "_"
"""What a step gets and does without."""
VIEW = "aten.view.default"
NEUTRAL = frozenset({VIEW, "aten.expand.default", "aten.slice.Tensor", "aten.detach.default", "aten.alias.default"})
"""Operators whose result shows the numbers of their first argument as they are (unlike a conjugate)."""

_FORWARD = (
    ("One training iteration of", "One forward of"),
    ("-> Tensor:", "-> list[Tensor]:"),
)


class _Emitter:
    def __init__(
        self, trace: TraceTables, nodes: Sequence[ComputeNode], rows: Sequence[PlanRow], slots: Sequence[Slot]
    ) -> None:
        self.trace = trace
        self.nodes = nodes
        self.rows = rows
        self.lines: list[str] = []
        self.defined: set[int] = set()
        self.same_as: dict[int, int] = {}
        """Views that show what another value shows, in the same form."""
        self.names_of_storage: dict[int, list[int]] = defaultdict(list)
        self.call_of = {v: c for c in trace.calls for v in c.returns if v >= 0}
        self.base_of = base_values(trace)
        self.runs = [0] * len(nodes)
        self.total = [0] * len(nodes)
        self.slots = {s.storage: s for s in slots}
        self.on_disk = {s.storage for s in slots if s.home == "disk"} if len({s.home for s in slots}) > 1 else set()
        self.under_way = {s.storage: s.start for s in slots if s.start in ("reloading", "offloading", "updating")}
        behind = left_behind(trace)
        stays = [g for g in trace.gradients if g.gradient_value in behind]
        self.left = {trace.values[g.gradient_value].storage: g.parameter for g in stays}
        self.left_value = {trace.values[g.gradient_value].storage: g.gradient_value for g in stays}
        self.reloaded = {r.storage for r in rows if r.action == "reload"}
        self.spent: set[int] = set()
        moved = {r.storage for r in rows if r.action in ("offload", "reload")} | self.slots.keys()
        pairs = ((r.node if r.action == "compute" else -1, r.storage if r.action == "free" else -1) for r in rows)
        self.taken = taken_memory(nodes, pairs, moved)
        for row in rows:
            if row.node >= 0:
                self.total[row.node] += 1

    def name(self, value: int) -> str:
        while value in self.same_as:
            value = self.same_as[value]
        return identifier(self.trace.values[value].name)

    def _define(self, value: int) -> None:
        self.defined.add(value)
        self.names_of_storage[self.trace.values[value].storage].append(value)

    def _ensure(self, value: int) -> None:
        """Make sure that `value` has a name: fetch persistent tensors, make views, both just before they are needed."""
        if value in self.defined:
            return
        call = self.call_of.get(value)
        if call is not None and not call.is_view and self._base(value) in self.defined:
            self._alias(value)
            return
        if call is None:
            role, name = role_of(self.trace.values[value].source)
            self.lines.append(f"{self.name(value)} = run.{role}[{quoted(name)}]")
            self._define(value)
            return
        if not call.is_view:
            raise AssertionError(f"value {self.name(value)} is read before call {call.call} has run")
        if call.target in NEUTRAL and self._same_form(value, call.reads[0]):
            self._ensure(call.reads[0])
            self.same_as[value] = call.reads[0]
            self._define(value)
            return
        call = self._of_whole(call)
        for read in call.reads:
            self._ensure(read)
        self.lines.append(self._assignment(call, call.arguments))
        for output in call.returns:
            if output >= 0 and output not in self.defined:
                self._define(output)

    def _same_form(self, one: int, other: int) -> bool:
        a, b = self.trace.values[one], self.trace.values[other]
        return (a.storage, a.dtype, a.shape, a.stride, a.offset) == (b.storage, b.dtype, b.shape, b.stride, b.offset)

    def _of_whole(self, call: Call) -> Call:
        """A view of a view that has no name yet as one of what that one is of, where all are contiguous."""
        while call.target == VIEW and call.reads[0] not in self.defined:
            inner = self.call_of.get(call.reads[0])
            if inner is None or inner.target != VIEW or not inner.is_view:
                break
            source = self.trace.values[inner.reads[0]]
            if 0 in source.shape or source.stride != _contiguous(source.shape):
                break
            shape = list(self.trace.values[call.returns[0]].shape)
            arguments = json.dumps({"args": [{"value": source.value}, shape], "kwargs": {}})
            call = replace(call, arguments=arguments, reads=(source.value,))
        return call

    def _assignment(self, call: Call, arguments: str) -> str:
        text = self._operation(call.target, arguments)
        if all(v < 0 for v in call.returns):
            return text
        names = [self.name(v) if v >= 0 else NOTHING for v in call.returns]
        results = [_targets(one) for one in grouped(names, call.groups)]
        return f"{', '.join(results)}{',' if call.returns_many and len(results) == 1 else ''} = {text}"

    def _operation(self, target: str, arguments: str) -> str:
        method = METHODS.get(target) or ALIKE.get(target)
        if method is not None and (split := split_receiver(arguments)) is not None:
            tensor, rest = split
            return f"{self.name(tensor)}.{method}({render_arguments(rest, self.name, spread=target in SPREAD)})"
        if target in FUNCTIONS:
            return f"torch.{FUNCTIONS[target]}({render_arguments(arguments, self.name)})"
        operator = operator_name(target) if target.startswith("aten.") else f"torch.ops.{operator_name(target)}"
        return f"{operator}({render_arguments(arguments, self.name)})"

    def _call(self, call: Call, node: ComputeNode, again: bool, note: str) -> None:
        for read in call.reads:
            self._ensure(read)
        if call.target == UPDATE:
            parameter, _ = updated_parameter(call.arguments)
            tensors = [self.name(v) for v in (call.reads[0], *call.reads[2:])]  # the parameter itself goes by name
            self.lines.append(f"run.update({quoted(parameter)}, {', '.join(tensors)}){note}")
            return
        if call.target == UPDATE_ALL:
            self._update_all(call, note)
            return
        if call.target == CLIP:
            self._clip(call, note)
            return
        arguments = call.replay_arguments if again and call.replay_arguments else call.arguments
        line = self._assignment(call, arguments) + note
        alone = bool(self.trace.meta.outputs)  # without gradients, as the kernel is called
        opaque = call.target in OPAQUE and not alone
        self.lines += ["with run.as_in_forward():", f"    {line}"] if opaque else [line]
        if -1 in call.returns and max(call.returns) >= 0:  # the kernel may make what a step does without
            self.lines.append(f"del {NOTHING}")
        for value in call.returns:
            if value >= 0 and value not in self.defined:
                self._define(value)

    def _clip(self, call: Call, note: str) -> None:
        """One norm for each gradient: too many for a line."""
        names = textwrap.wrap(", ".join(self.name(v) for v in call.reads), 100, break_long_words=False)
        _, limit = render_arguments(call.arguments, self.name).rsplit(", ", 1)
        self.lines += ["norms = [", *(f"    {line}" for line in names), "]"]
        self.lines += [f"{self.name(call.returns[0])} = run.clip(norms, {limit}){note}", "del norms"]
        self._define(call.returns[0])

    def _update_all(self, call: Call, note: str) -> None:
        """One step of the optimizer, a gradient a line."""
        gradients = jointly_updated(call.arguments)
        names = [f"    {quoted(name)}: {self.name(value)}," for name, value in gradients.items()]
        scale = "".join(f", {self.name(v)}" for v in call.reads[2 * len(gradients) :])
        self.lines += ["gradients = {", *names, "}", f"run.update_all(gradients{scale}){note}", "del gradients"]

    def is_update(self, row: PlanRow) -> bool:
        """Whether a row is the update of one parameter on the device."""
        calls = self.nodes[row.node].calls if row.action == "compute" else ()
        return [self.trace.calls[c].target for c in calls] == [UPDATE]

    def updates(self, rows: Sequence[PlanRow]) -> None:
        """Updates with nothing between them: one step of the optimizer, a gradient a line."""
        calls = [self.trace.calls[c] for row in rows for c in self.nodes[row.node].calls]
        for read in (v for call in calls for v in call.reads):
            self._ensure(read)
        lines = [f"    {quoted(updated_parameter(c.arguments)[0])}: {self.name(c.reads[0])}," for c in calls]
        scale = "".join(f", {self.name(v)}" for v in calls[0].reads[2:])
        time_s = sum(self.nodes[row.node].time_s for row in rows)
        note = f"  # {len(rows)} updates, {time_s * 1e3:.2f} ms"
        self.lines += ["gradients = {", *lines, "}", f"run.update_together(gradients{scale}){note}", "del gradients"]
        for row in rows:
            self.runs[row.node] += 1
            self._gradients_changed(self.nodes[row.node])

    def compute(self, row: PlanRow) -> None:
        node = self.nodes[row.node]
        again = self.runs[row.node] > 0
        self.runs[row.node] += 1
        nbytes = sum(self.trace.storages[s].nbytes for s in node.creates)
        late = "end" if node.phase == "update" else "shared"
        where = late if node.block < 0 else f"block {node.block}"
        note = f"  # {where}, {nbytes / MIB:.1f} MiB, {node.time_s * 1e3:.2f} ms{', again' if again else ''}"
        calls = [self.trace.calls[c] for c in node.calls]
        if row.row in self.taken:
            calls = [written_over(calls[0], self.taken[row.row], self.trace)]
        if not node.random or self.total[row.node] == 1:
            for i, call in enumerate(calls):
                self._call(call, node, again, note if i == len(calls) - 1 else "")
            self._gradients_changed(node)
            return
        own = set(node.creates)
        for read in (v for call in calls for v in call.reads):
            if self.trace.values[read].storage not in own:
                self._ensure(read)
        self.lines.append(f"with run.random.{'replay' if again else 'record'}({node.node}):")
        start = len(self.lines)
        for i, call in enumerate(calls):
            self._call(call, node, again, note if i == len(calls) - 1 else "")
        self.lines[start:] = ["    " + line for line in self.lines[start:]]
        if again and self.runs[row.node] == self.total[row.node]:
            self.lines.append(f"run.random.forget({node.node})")

    def _gradients_changed(self, node: ComputeNode) -> None:
        """Of gradients that wait and have a place below: an update has used one up, or its copy is out of date."""
        storages = self.trace.storages
        taken = taken_gradients(c for c in map(self.trace.calls.__getitem__, node.calls) if c.target != ADD)
        updates = {self.trace.values[v].storage for v in taken}
        self.spent |= {s for s in updates if storages[s].role == "gradient"}
        for storage in node.mutates:
            if storages[storage].role == "gradient" and storage in self.slots:
                self.lines.append(f"run.changed({quoted(self.slots[storage].name)})")

    def _base(self, value: int) -> int:
        """The first value of the storage that `value` lives in."""
        return self.base_of[self.trace.values[value].storage]

    def _alias(self, value: int) -> None:
        """Another name for reloaded memory: what an in-place call returned."""
        v, base = self.trace.values[value], self.name(self._base(value))
        self.lines.append(
            f"{self.name(value)} = aten.as_strided.default({base}, {list(v.shape)}, {list(v.stride)}, {v.offset})"
        )
        self._define(value)

    def free(self, row: PlanRow) -> None:
        names = self.names_of_storage.pop(row.storage, [])
        if names:
            self.lines.append(f"del {', '.join(dict.fromkeys(map(self.name, names)))}")
        self.defined.difference_update(names)
        for value in names:
            self.same_as.pop(value, None)
        role = self.trace.storages[row.storage].role
        slot = self.slots.get(row.storage)
        if role == "temporary" and slot is not None and slot.role == "gradient":
            self.lines.append(f"run.keep_below({quoted(self.left[row.storage])})")
            del self.left[row.storage]
        elif role != "temporary" and row.storage not in self.spent:
            self.lines.append(f"run.free({self._slot(row)})")

    def _slot(self, row: PlanRow) -> str:
        return quoted(self.slots[row.storage].name)

    def offload(self, row: PlanRow) -> None:
        slot = self.slots[row.storage]
        self.under_way[row.storage] = "offloading"
        where = " to disk" if row.storage in self.on_disk else ""
        note = f"  # {slot.nbytes / MIB:.1f} MiB down{where}, {(row.end_s - row.start_s) * 1e3:.1f} ms"
        if self.trace.storages[row.storage].role != "temporary":
            self.lines.append(f"run.offload({self._slot(row)}){note}")
            return
        held = self.base_of[row.storage]
        if slot.role == "gradient" and row.storage not in self.reloaded:
            held = self.left_value.get(row.storage, held)  # it waits in `.grad`, in the form that it has there
        self._ensure(held)
        self.lines.append(f"run.offload({self._slot(row)}, {self.name(held)}){note}")

    def reload(self, row: PlanRow) -> None:
        self.under_way[row.storage] = "reloading"
        where = " from disk" if row.storage in self.on_disk else ""
        note = f"  # {self.slots[row.storage].nbytes / MIB:.1f} MiB up{where}, {(row.end_s - row.start_s) * 1e3:.1f} ms"
        self.lines.append(f"run.reload({self._slot(row)}){note}")

    def update(self, row: PlanRow) -> None:
        """An update by the CPU, on what is below."""
        call = self.trace.calls[self.nodes[row.node].calls[0]]
        taken = (call.reads[0], *call.reads[2:])  # the gradient, and the scale that clips it
        names = ", ".join(quoted(self.slots[self.trace.values[v].storage].name) for v in taken)
        names += self._form(call.reads[0])
        self.under_way[row.storage] = "updating"
        where = ", from and to disk" if row.storage in self.on_disk else ""
        note = f"  # on the CPU{where}, {(row.end_s - row.start_s) * 1e3:.1f} ms"
        self.lines.append(f"run.update_below({self._slot(row)}, {names}){note}")

    def _form(self, gradient: int) -> str:
        """How a gradient lies in what went below, where it is a view of that."""
        v = self.trace.values[gradient]
        base = self.trace.values[self.base_of[v.storage]]
        if (v.shape, v.stride, v.offset) == (base.shape, base.stride, base.offset):
            return ""
        return f", form=({list(v.shape)}, {list(v.stride)}, {v.offset - base.offset})"

    def wait(self, row: PlanRow) -> None:
        if self.under_way.get(row.storage) == "updating":
            del self.under_way[row.storage]
            self.lines.append(f"run.wait({self._slot(row)})  # without: its old value would be reloaded")
            return
        reloading = self.under_way.pop(row.storage) == "reloading"
        text = f"run.wait({self._slot(row)})"
        if reloading and self.trace.storages[row.storage].role == "temporary":
            base = self.base_of[row.storage]
            text = f"{self.name(base)} = {text}"
            self._define(base)
        if reloading:
            why = f"{self._next_reader(row)} would read it before it is here"
        else:
            why = "its memory would be changed or freed while it is copied"
        self.lines.append(f"{text}  # without: {why}")

    def left_in_objects(self) -> None:
        """What the step leaves in the user's objects."""
        for value in self.trace.meta.left:
            self._ensure(value)
        names = textwrap.wrap(", ".join(map(self.name, self.trace.meta.left)), 100, break_long_words=False)
        self.lines += ["", "# left in the user's objects", "run.leave([", *(f"    {line}" for line in names), "])"]

    def outputs(self) -> None:
        """What a forward alone returns. Constants are the program's own, so that copies of them are returned."""
        found = []
        for value in self.trace.meta.outputs:
            self._ensure(value)
            own = self.trace.values[value].source.startswith("constant:")
            found.append(f"{self.name(value)}.clone()" if own else self.name(value))
        lines = textwrap.wrap(", ".join(found) + ",", 100, break_long_words=False)
        self.lines += ["", "return [", *(f"    {line}" for line in lines), "]"]

    def _next_reader(self, row: PlanRow) -> str:
        for later in self.rows[row.row + 1 :]:
            if later.node >= 0:
                node = self.nodes[later.node]
                if row.storage in node.reads or row.storage in node.mutates:
                    return remark(node.name)
        return "the next iteration"


def _targets(names: str | list[str]) -> str:
    """What one result is assigned to."""
    if isinstance(names, str):
        return names
    if all(name == NOTHING for name in names):
        return NOTHING
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose elements lie in their order."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def emit_step(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    rows: Sequence[PlanRow],
    summary: PlanSummary,
    slots: Sequence[Slot] = (),
) -> str:
    """The text of `step.py`: equal plans give equal bytes."""
    emitter = _Emitter(trace, nodes, rows, slots)
    act = {
        "compute": emitter.compute,
        "free": emitter.free,
        "offload": emitter.offload,
        "reload": emitter.reload,
        "wait": emitter.wait,
        "update": emitter.update,
    }
    label = ""
    for together, found in groupby(rows, emitter.is_update):
        group = list(found)
        for row in group:
            if row.step != label:
                label = row.step
                emitter.lines += ["", f"run.begin({quoted(label)})"]
            if not together or len(group) == 1:
                act[row.action](row)
        if together and len(group) > 1:
            emitter.updates(group)
    behind = left_behind(trace)
    left = [
        g
        for g in trace.gradients
        if g.gradient_value in behind and trace.values[g.gradient_value].storage in emitter.left
    ]
    scale = "".join(f", {emitter.name(v)}" for c in trace.calls if c.target == CLIP for v in c.returns)
    if left:
        emitter.lines += ["", "# gradients stay"]
        for gradient in left:
            emitter._ensure(gradient.gradient_value)
            emitter.lines.append(
                f"run.keep({quoted(gradient.parameter)}, {emitter.name(gradient.gradient_value)}{scale})"
            )
    template = _HEADER
    if trace.meta.outputs:
        emitter.outputs()
        for training, alone in _FORWARD:
            template = template.replace(training, alone)
    else:
        if trace.meta.left:
            emitter.left_in_objects()
        emitter._ensure(trace.meta.loss_value)
        emitter.lines += ["", f"return {emitter.name(trace.meta.loss_value)}"]
    header = template.format(
        model=remark(trace.meta.model),
        device=remark(summary.device),
        plan=remark(summary.plan_hash),
        method=remark(summary.method),
        budget=summary.device_budget_bytes / MIB,
        peak=summary.device_peak_bytes / MIB,
        time=summary.step_time_s,
    )
    return header + "\n".join(f"    {line}" if line else "" for line in emitter.lines) + "\n"
