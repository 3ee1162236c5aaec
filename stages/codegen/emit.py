"""Writes `step.py` from the tables alone: one line for each operation, the same bytes each time."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby

from stowage.stages.codegen.actions import Actions
from stowage.stages.codegen.header import header
from stowage.stages.codegen.names import Identifiers
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow, PlanSummary, Slot
from stowage.stages.ir.source import quoted
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import Unit
from stowage.stages.ir.updates import CLIP, left_behind


def emit_step(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    rows: Sequence[PlanRow],
    summary: PlanSummary,
    slots: Sequence[Slot] = (),
    units: Sequence[Unit] = (),
) -> str:
    """Return the text of `step.py`: equal plans give equal bytes. Rows that some `units` alone need have conditions."""
    actions = Actions(trace, nodes, rows, slots, units)
    names, label = actions.names, ""
    for (together, _), found in groupby(rows, actions.kind):
        group = list(found)
        for row in group:
            if row.step != label:
                label = row.step
                names.lines += ["", f"run.begin({quoted(label)})"]
            if not together or len(group) == 1:
                actions.write(row)
        if together and len(group) > 1:
            actions.updates(group)
    _keep_gradients(trace, actions)
    if trace.meta.outputs:
        _return_outputs(trace, names)
    else:
        _return_loss(trace, names)
    return header(trace.meta, summary) + "\n".join(f"    {line}" if line else "" for line in names.lines) + "\n"


def _keep_gradients(trace: TraceTables, actions: Actions) -> None:
    """Leave in `.grad` the gradients that the plan's actions have not left there."""
    names, behind = actions.names, left_behind(trace)
    left = [
        g
        for g in trace.gradients
        if g.gradient_value in behind and trace.values[g.gradient_value].storage in actions.left
    ]
    scale = "".join(f", {names.name(v)}" for c in trace.calls if c.target == CLIP for v in c.returns)
    if left:
        names.lines += ["", "# gradients stay"]
    for gradient in left:
        with actions.guarding.under(actions.guarding.of_parameter(gradient.parameter)):
            names.ensure(gradient.gradient_value)
            value = names.name(gradient.gradient_value)
            names.lines.append(f"run.keep({quoted(gradient.parameter)}, {value}{scale})")


def _return_loss(trace: TraceTables, names: Identifiers) -> None:
    """Hand out what the step leaves in the user's objects, then return the loss."""
    if trace.meta.left:
        for value in trace.meta.left:
            names.ensure(value)
        lines = textwrap.wrap(", ".join(map(names.name, trace.meta.left)), 100, break_long_words=False)
        names.lines += ["", "# left in the user's objects", "run.leave([", *(f"    {line}" for line in lines), "])"]
    names.ensure(trace.meta.loss_value)
    names.lines += ["", f"return {names.name(trace.meta.loss_value)}"]


def _return_outputs(trace: TraceTables, names: Identifiers) -> None:
    """Return what a forward alone gives. Constants are the program's own, so that copies of them are returned."""
    found = []
    for value in trace.meta.outputs:
        names.ensure(value)
        own = trace.values[value].source.startswith("constant:")
        found.append(f"{names.name(value)}.clone()" if own else names.name(value))
    lines = textwrap.wrap(", ".join(found) + ",", 100, break_long_words=False)
    names.lines += ["", "return [", *(f"    {line}" for line in lines), "]"]
