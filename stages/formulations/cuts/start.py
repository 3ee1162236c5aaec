"""Gives the variables of the cut formulation their values in a schedule that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from stowage.stages.formulations.cuts.model import CutModel
from stowage.stages.formulations.cuts.step_graph import StepGraph, both_lanes_s

Live = Callable[[Sequence[int]], Sequence[Collection[int]]]


def start_from(model: CutModel, order: Sequence[int], live: Live | None = None) -> None:
    """Set every variable to its value in a schedule, in which each value is freed after the last that reads it.

    Args:
        model: the model.
        order: the nodes in the order in which they run.
        live: returns what is in memory while the runs at some positions are under way; by default each value from the
            node that makes it to the last that reads it.
    """
    first = {node: position for position, node in reversed(list(enumerate(order)))}
    ends = [first[g] for g in model.cuts]
    interval_of = _intervals(ends, len(order))
    counts = Counter((node, interval_of[p]) for p, node in enumerate(order))
    kept = live(ends) if live is not None else live_at(model.step, order, ends)
    for key, variable in model.run.items():
        variable.setInitialValue(int(key in counts))
    for key, variable in model.again.items():
        variable.setInitialValue(int(counts[key] > 1))
    for (value, cut), variable in model.kept.items():
        variable.setInitialValue(int(value in kept[cut - 1]))
    for (node, cut), variable in model.since.items():
        variable.setInitialValue(int(any((node, i) in counts for i in model.free_after(node, cut))))
    ran = set(order)
    for charge, variable in zip(model.step.charges, model.used, strict=True):
        variable.setInitialValue(int(not charge.nodes.isdisjoint(ran)))
    model.sure.setInitialValue(1)
    for beside in (b for row in model.beside.values() for b in row):
        if beside.until is not None:
            value, cut = beside.until
            remade = model.remade(beside)
            made_again = remade if isinstance(remade, int) else remade.varValue
            lasts = max(0, int(value in kept[cut - 1]) - int(made_again))
            model.lasts[value, cut - 1].setInitialValue(lasts)
    if model.total is not None:
        together, computing = (
            model.time_of(n.node for n in model.step.nodes if n.collective is c) for c in (True, False)
        )
        model.total.setInitialValue(both_lanes_s(computing.value(), together.value()))


def _intervals(ends: Sequence[int], length: int) -> list[int]:
    found, interval = [], 0
    for position in range(length):
        found.append(interval)
        if interval < len(ends) and position == ends[interval]:
            interval += 1
    return found


def live_at(step: StepGraph, order: Sequence[int], positions: Sequence[int]) -> list[set[int]]:
    """Return what is in memory while the runs at some positions are under way."""
    made: dict[int, int] = dict.fromkeys(step.waiting, -1)
    spans: dict[tuple[int, int], int] = {}
    for position, node in enumerate(order):
        for value in step.reads[node]:
            spans[value, made[value]] = position
        for value in step.nodes[node].creates:
            made[value] = position
            spans[value, position] = position
    for value in step.stays:
        spans[value, made[value]] = len(order)
    return [{value for (value, begins), ends in spans.items() if begins <= p <= ends} for p in positions]
