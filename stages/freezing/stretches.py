"""Finds the guards of transfers of persistent storages: of the stretches in which these are on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from stowage.stages.ir.actions import ACTIONS, STARTS
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.step import Step
from stowage.stages.ir.units import ALWAYS, joined


def started_by(steps: Sequence[Step]) -> dict[int, int]:
    """Return, for each wait, the row that started what it waits for; not where that is in the iteration before."""
    under_way: dict[int, int] = {}
    found: dict[int, int] = {}
    for number, step in enumerate(steps):
        if ACTIONS[step.kind].beside:
            under_way[step.storage] = number
        elif ACTIONS[step.kind].ends and step.storage in under_way:
            found[number] = under_way.pop(step.storage)
    return found


@dataclass
class _Stretch:
    """A storage on the device, from its reload on."""

    rows: list[int] = field(default_factory=list)
    guard: int = 0


def persistent_guards(
    nodes: Sequence[ComputeNode],
    steps: Sequence[Step],
    guards: Sequence[int],
    moved: Collection[int],
    starts: Mapping[int, int],
) -> list[int]:
    """Return the guards of all rows, with those of transfers of persistent storages.

    A stretch from a reload to a free is skipped where nothing that reads or changes the storage in it runs. What is on
    the device when the iteration begins or ends is transferred always.

    Args:
        nodes: the program's nodes.
        steps: the plan.
        guards: the guards of the rows that compute.
        moved: the persistent storages that are transferred.
        starts: see `started_by`.
    """
    found = list(guards)
    open_: dict[int, _Stretch] = {}
    for number, step in enumerate(steps):
        if step.kind == "reload" and step.storage in moved:
            open_[step.storage] = _Stretch([number])
        elif step.storage in moved and step.kind in ("offload", "wait", "free"):
            stretch = open_.get(step.storage)
            if stretch is not None and (step.kind != "wait" or starts.get(number) in stretch.rows):
                stretch.rows.append(number)
            if step.kind == "free" and stretch is not None:
                del open_[step.storage]
                for row in stretch.rows:
                    found[row] = stretch.guard or ALWAYS
        elif step.kind == "compute" or step.kind in STARTS:
            node = nodes[step.node]
            for storage in (*node.reads, *node.mutates):
                if storage in open_:
                    open_[storage].guard = joined(open_[storage].guard, guards[number])
    return found
