"""Defines what the rows of a plan do: one table of actions, and one of the lanes on which their work runs.

Code that needs a fact about an action asks `ACTIONS`: the referee and its clock, pictures, reports and code generation.
A new action is one row here (and one of `LANES`, if it has a lane of its own), its rule in `simulate/replay.py` and its
line in `codegen/actions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PlanAction = Literal["compute", "free", "wait", "offload", "reload", "update", "gather", "scatter"]
"""Names of what a row does.

`compute` runs a node on the device, and `free` drops the device's copy of a storage. `offload` starts a copy from the
device to the lower tier, `reload` one back into device memory that is taken at its start, and `wait` ends when the
transfers under way for its storage have ended. `update` starts the update of a parameter by the CPU, on the weight,
the states and the gradient in the lower tier. `gather` and `scatter` start a collective node over all ranks, whose
results exist when the `wait` for the first of them has ended; until then what it reads must stay as it is. The first
letters differ, because a plan's hash is made of them.
"""

LaneName = Literal["compute", "offload", "reload", "write", "read", "update", "collective"]


@dataclass(frozen=True)
class Lane:
    """A queue whose work runs one piece after the other, beside the work of the other lanes.

    Attributes:
        carrier: what does the work: the device, the link between the device and the lower tier, the link between
            the host and the disk behind it, or something `apart`, which no other lane slows down.
        direction: the direction of a link's lane.
        shown: pictures have a line for the lane.
    """

    carrier: Literal["device", "link", "disk", "apart"]
    direction: Literal["down", "up", ""] = ""
    shown: bool = True


LANES: dict[LaneName, Lane] = {
    "compute": Lane("device"),
    "offload": Lane("link", "down"),
    "reload": Lane("link", "up"),
    "write": Lane("disk", "down", shown=False),
    "read": Lane("disk", "up", shown=False),
    "update": Lane("apart"),
    "collective": Lane("apart"),
}


@dataclass(frozen=True)
class Kind:
    """The facts about an action that hold in every row with it.

    Attributes:
        lane: the lane on which its work runs.
        beside: its work runs beside computing, which does not wait for it: the row only starts it.
        transfers: it copies the bytes of its storage between the device and the lower tier.
        on_node: it runs the node that its row names.
        takes_device_memory: memory for its storage is taken when the row begins.
        ends: it ends when the transfers under way for its storage have ended.
        colour: its colour in pictures; empty where it is not drawn, or drawn by the part of the step it belongs to.
        total: what the report calls the total time of all such rows; empty where the report does not say it.
    """

    lane: LaneName = "compute"
    beside: bool = False
    transfers: bool = False
    on_node: bool = False
    takes_device_memory: bool = False
    ends: bool = False
    colour: str = ""
    total: str = ""


ACTIONS: dict[PlanAction, Kind] = {
    "compute": Kind(on_node=True, takes_device_memory=True, total="all steps"),
    "free": Kind(),
    "wait": Kind(ends=True, colour="#cc3344", total="of it waiting"),
    "offload": Kind("offload", beside=True, transfers=True, colour="#ee9933", total="copies down"),
    "reload": Kind(
        "reload", beside=True, transfers=True, takes_device_memory=True, colour="#66bbcc", total="copies up"
    ),
    "update": Kind("update", beside=True, on_node=True, colour="#aa5599", total="updates"),
    "gather": Kind(
        "collective", beside=True, on_node=True, takes_device_memory=True, colour="#5577bb", total="gathers"
    ),
    "scatter": Kind(
        "collective", beside=True, on_node=True, takes_device_memory=True, colour="#77aa55", total="scatters"
    ),
}


STARTS: frozenset[PlanAction] = frozenset({"gather", "scatter"})
"""Actions that start a collective node."""


def shown_lanes() -> list[LaneName]:
    """Return the lanes that have a line in pictures, in their order."""
    return [name for name, lane in LANES.items() if lane.shown]
