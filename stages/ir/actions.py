"""What the rows of a plan do: one table of actions, and one of the lanes on which their work goes on.

Whoever needs to know something about an action asks `ACTIONS`: the referee and its clock, pictures, reports, and code
generation. A new action is one row here (and one of `LANES`, if it has a lane of its own), its rule in
`simulate/replay.py` and its line in `codegen/actions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PlanAction = Literal["compute", "free", "wait", "offload", "reload", "update"]
"""`compute` runs a node on the device, and `free` drops the device's copy of a storage. `offload` starts a copy from
the device to the tier below, `reload` one back into device memory that is taken at its start, and `wait` ends with what
is under way for its storage. `update` starts the update of a parameter by the CPU, on what is below: weight, states and
gradient. The first letters differ, because a plan's hash is made of them."""

LaneName = Literal["compute", "offload", "reload", "write", "read", "update"]


@dataclass(frozen=True)
class Lane:
    """A queue: what is on it runs one after the other, and beside the other lanes.

    Attributes:
        carrier: what works on it: the device itself, the link between the device and the tier below, the link between
            the host and the disk behind it, or something `apart`, which no other lane slows down.
        direction: of a link's lane.
        shown: pictures have a line for it.
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
}


@dataclass(frozen=True)
class Kind:
    """What is true of an action, whichever row it is in.

    Attributes:
        lane: where its work goes on.
        beside: its work goes on beside computing, which does not wait for it: the row only starts it.
        moves: it copies the bytes of its storage between the device and the tier below.
        on_node: it runs the node that its row names.
        takes_device_memory: memory for its storage is taken when the row begins.
        ends: it ends with what is under way for its storage.
        colour: in pictures; none where it is not drawn, or drawn by the part of the step that it belongs to.
        total: what the report calls the time of all such rows together; empty where it is not told.
    """

    lane: LaneName = "compute"
    beside: bool = False
    moves: bool = False
    on_node: bool = False
    takes_device_memory: bool = False
    ends: bool = False
    colour: str = ""
    total: str = ""


ACTIONS: dict[PlanAction, Kind] = {
    "compute": Kind(on_node=True, takes_device_memory=True, total="all steps"),
    "free": Kind(),
    "wait": Kind(ends=True, colour="#cc3344", total="of it waiting"),
    "offload": Kind("offload", beside=True, moves=True, colour="#ee9933", total="copies down"),
    "reload": Kind("reload", beside=True, moves=True, takes_device_memory=True, colour="#66bbcc", total="copies up"),
    "update": Kind("update", beside=True, on_node=True, colour="#aa5599", total="updates"),
}


def shown_lanes() -> list[LaneName]:
    """The lanes that have a line in pictures, in their order."""
    return [name for name, lane in LANES.items() if lane.shown]
