"""Writes conditions around the lines of a plan that freezes, and drops tensors that a run reads no more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from stowage.stages.codegen.names import Identifiers
from stowage.stages.freezing.guards import guards_of
from stowage.stages.freezing.kernels import trained_guards
from stowage.stages.freezing.outputs import Omissible, copied_guards, optional_results
from stowage.stages.ir.arguments import active_text
from stowage.stages.ir.flags import made_anyway
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.units import ALWAYS, Unit, bits_of, implies, spans

_OPTIONAL = "active"


class Guarding:
    """Knows the guards of a plan's rows, and writes them; without units it writes nothing."""

    def __init__(
        self,
        trace: TraceTables,
        nodes: Sequence[ComputeNode],
        rows: Sequence[PlanRow],
        units: Sequence[Unit],
        names: Identifiers,
    ) -> None:
        self._trace, self._nodes, self._units, self._names = trace, nodes, units, names
        self._of = bits_of(units)
        self._copied = copied_guards(trace, units) if units else {}
        self._trained = trained_guards(trace, units) if units else {}
        self._guards = guards_of(trace, nodes, [Step.of(row) for row in rows], units) if units else None

    def guard(self, row: PlanRow) -> int:
        """Return the guard of a row."""
        return self._guards.rows[row.row] if self._guards is not None else ALWAYS

    def of_parameter(self, name: str) -> int:
        """Return the guard of a parameter's unit."""
        return self._of.get(name, ALWAYS)

    @contextmanager
    def row(self, row: PlanRow) -> Iterator[None]:
        """Put what is written inside under the guard of a row; behind it, drop what may be read no more."""
        if self._guards is None:
            yield
            return
        self._lacking(row)
        with self.under(self.guard(row)):
            with self._stand_ins(row):
                yield
            runs = self._guards.forgets.get(row.row)
            if runs is not None:
                start = len(self._names.lines)
                self._names.lines.append(f"run.random.forget({row.node})")
                self._names.surround(f"not {self._active(runs)}", start)
        for later, storages in self._dropped(row).items():
            start = len(self._names.lines)
            self._names.release(storages)
            self._names.surround(f"not {self._active(later)}" if later else "", start)

    @contextmanager
    def under(self, guard: int) -> Iterator[None]:
        """Put what is written inside under a guard."""
        start, before = len(self._names.lines), self._names.guard
        self._names.guard = guard
        try:
            yield
        finally:
            self._names.guard = before
        self._names.surround("" if guard & ALWAYS else self._active(guard), start)

    def of_call(self, call: Call, row: PlanRow) -> int:
        """Return the guard under which a row makes a call; `ALWAYS` where it does whenever it runs."""
        found = self._copied.get(call.call)
        return ALWAYS if found is None or implies(self.guard(row), found.guard) else found.guard

    def with_flags(self, call: Call, row: PlanRow) -> Call:
        """Return a call that leaves out results which a run does not read, and knows what its kernels depend on."""
        if self._guards is None:
            return call
        if not (trained := self._trained.get(call.call, ALWAYS)) & ALWAYS:
            content = json.loads(call.arguments)
            content["args"][-1] = {_OPTIONAL: spans(self._units, trained)}
            return replace(call, arguments=json.dumps(content))
        found = self._left_out(call, row)
        if not found:
            return call
        content = json.loads(call.arguments)
        for result in found:
            content["args"][-1][result.output] = (
                {_OPTIONAL: spans(self._units, result.guard)} if result.guard else False
            )
        return replace(call, arguments=json.dumps(content))

    def _left_out(self, call: Call, row: PlanRow) -> list[Omissible]:
        """Return the results of a call that it is not asked for where nothing reads them."""
        assert self._guards is not None
        anyway = made_anyway(call.target, self._trace.meta.device)
        found = optional_results(self._trace, call, self._guards.outputs[row.row], self.guard(row))
        return [one for one in found if one.output != anyway]

    def _active(self, guard: int) -> str:
        return active_text(spans(self._units, guard))

    def _lacking(self, row: PlanRow) -> None:
        """Give names to what a row reads if it is there, and to what is not."""
        assert self._guards is not None
        guards: dict[int, list[int]] = {}
        own = self._guards.lacking.get(row.row, {})
        reads = (v for c in self._nodes[row.node].calls for v in self._trace.calls[c].reads) if own else ()
        for value in reads:
            guard = own.get(self._trace.values[value].storage, ALWAYS)
            if not guard & ALWAYS:
                guards.setdefault(guard, []).append(value)
        for guard, values in guards.items():
            with self.under(guard):
                for value in values:
                    self._names.ensure(value)
            start = len(self._names.lines)
            self._names.lack(values)
            self._names.surround(f"not {self._active(guard)}", start)
            for value in values:
                self._names.define(value)

    @contextmanager
    def _stand_ins(self, row: PlanRow) -> Iterator[None]:
        """Let something of their form stand for arguments that are not there, while what is inside runs."""
        assert self._guards is not None
        found = self._guards.stand_ins.get(row.row, ())
        for one in found:
            value, start = self._trace.values[one.value], len(self._names.lines)
            kind = {"dtype": {"dtype": value.dtype}, "device": {"device": self._trace.meta.device}}
            form = {"args": [list(value.shape), list(value.stride)], "kwargs": kind}
            self._names.lines.append(self._names.made(one.value, "aten.empty_strided.default", json.dumps(form)))
            self._names.surround(f"not {self._active(one.guard)}", start)
            self._names.define(one.value)
        yield
        for one in found:
            start = len(self._names.lines)
            self._names.lack([one.value])
            self._names.surround(f"not {self._active(one.guard)}", start)

    def _dropped(self, row: PlanRow) -> dict[int, list[int]]:
        """Return what may be read no more behind a row, by the guard of those that may read it still."""
        assert self._guards is not None
        found: dict[int, list[int]] = {}
        left_out: set[int] = set()
        if row.node >= 0 and row.action == "compute":
            calls = map(self._trace.calls.__getitem__, self._nodes[row.node].calls)
            left_out = {o.storage for c in calls for o in self._left_out(c, row)}
        for storage, later in self._guards.releases.get(row.row, {}).items():
            if storage not in left_out:
                found.setdefault(later, []).append(storage)
        return found
