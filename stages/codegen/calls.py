"""Writes the lines of the calls that a node makes: operators, and what the optimizer and clipping do."""

from __future__ import annotations

import textwrap

from stowage.stages.codegen.names import NOTHING, Identifiers
from stowage.stages.ir.arguments import render_arguments
from stowage.stages.ir.collectives import COLLECTIVES, GATHER, scattered
from stowage.stages.ir.operators import OPAQUE
from stowage.stages.ir.source import quoted, role_of
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE, UPDATE_ALL, jointly_updated, updated_parameter


class Calls:
    """Writes calls into the lines of `names`."""

    def __init__(self, trace: TraceTables, names: Identifiers) -> None:
        self._trace = trace
        self._names = names

    def call(self, call: Call, again: bool, note: str) -> None:
        """Write one call, with the views that it reads."""
        for read in call.reads if call.target != GATHER else ():
            self._names.ensure(read)
        if call.target == UPDATE:
            parameter, _ = updated_parameter(call.arguments)
            tensors = [
                self._names.name(v) for v in (call.reads[0], *call.reads[2:])
            ]  # the parameter itself is given by name
            self._names.lines.append(f"run.update({quoted(parameter)}, {', '.join(tensors)}){note}")
            return
        if call.target == UPDATE_ALL:
            self._update_all(call, note)
            return
        if call.target == CLIP:
            self._clip(call, note)
            return
        if call.target in COLLECTIVES:
            self.start(call, note)
            self.end(call)
            return
        arguments = call.replay_arguments if again and call.replay_arguments else call.arguments
        line = self._names.assignment(call, arguments) + note
        alone = bool(self._trace.meta.outputs)  # the kernel is called without gradients
        opaque = call.target in OPAQUE and not alone
        self._names.lines += ["with run.as_in_forward():", f"    {line}"] if opaque else [line]
        if -1 in call.returns and max(call.returns) >= 0:  # the kernel may make results that a step ignores
            self._names.lines.append(f"del {NOTHING}")
        for value in call.returns:
            if value >= 0 and not self._names.has(value):
                self._names.define(value)

    def start(self, call: Call, note: str) -> None:
        """Write the start of a collective."""
        if call.target == GATHER:
            names = [role_of(self._trace.values[v].source)[1] for v in call.reads]
            lines = textwrap.wrap(", ".join(map(quoted, names)), 100, break_long_words=False, break_on_hyphens=False)
            key = quoted(self._names.name(call.returns[0]))
            if len(lines) == 1:
                self._names.lines.append(f"run.gather({key}, [{lines[0]}]){note}")
            else:
                self._names.lines += [f"run.gather({key}, [", *(f"    {line}" for line in lines), f"]){note}"]
            return
        for read in call.reads:
            self._names.ensure(read)
        gradients = scattered(call.arguments)
        names = [f"    {quoted(name)}: {self._names.name(value)}," for name, value in gradients.items()]
        self._names.lines += ["gradients = {", *names, "}", f"run.scatter(gradients){note}", "del gradients"]

    def end(self, call: Call, note: str = "") -> None:
        """Write the wait for a collective's results."""
        names = ", ".join(self._names.name(v) for v in call.returns) + "," * (len(call.returns) == 1)
        key = self._names.name(call.returns[0]) if call.target == GATHER else call.module
        verb = "gathered" if call.target == GATHER else "scattered"
        self._names.lines.append(f"{names} = run.{verb}({quoted(key)}){note}")
        for value in call.returns:
            self._names.define(value)

    def _clip(self, call: Call, note: str) -> None:
        """Write one norm for each gradient, on lines of their own because there are many."""
        names = textwrap.wrap(", ".join(self._names.name(v) for v in call.reads), 100, break_long_words=False)
        _, limit = render_arguments(call.arguments, self._names.name).rsplit(", ", 1)
        self._names.lines += ["norms = [", *(f"    {line}" for line in names), "]"]
        self._names.lines += [f"{self._names.name(call.returns[0])} = run.clip(norms, {limit}){note}", "del norms"]
        self._names.define(call.returns[0])

    def _update_all(self, call: Call, note: str) -> None:
        """Write one step of the optimizer, with a line for each gradient."""
        gradients = jointly_updated(call.arguments)
        names = [f"    {quoted(name)}: {self._names.name(value)}," for name, value in gradients.items()]
        scale = "".join(f", {self._names.name(v)}" for v in call.reads[2 * len(gradients) :])
        self._names.lines += ["gradients = {", *names, "}", f"run.update_all(gradients{scale}){note}", "del gradients"]
