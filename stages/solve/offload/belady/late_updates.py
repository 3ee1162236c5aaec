"""Chooses the updates for the CPU where gradients outlive the step that completes them: clipped or accumulated ones.

O-ILP (thesis 4.4) lets the CPU update a weight in the window g_w < t < f_w, from its last gradient around the cycle to
its first use in forward. With clipping by global norm no update starts before the norm of all gradients is known, at
the end of backward: g_w is late, and the same for every weight, and the window is what the device still has to do then,
and forward up to f_w. So weights that forward uses late come first, and there are only so many that one worker can do
in time.

| symbol | here | meaning | unit |
|---|---|---|---|
| f_w | `first_use` | where forward uses the weight first | position |
| c_w | `time_s` | the update by the CPU, the clipping of its gradient included | s |
| E | `_end_s` | what the device still does after the norm: its own updates, and their transfers | s |

A set S of updates, in the order of f_w, is done in time if the c of those up to w sum up to at most E(S) + the time of
forward before f_w − the time of the weight's reload, for every w in S (one release time, earliest deadline first:
J. R. Jackson, Scheduling a production line to minimize maximum tardiness, 1955).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.program.chain import Execution

SHARES_OF_THOSE_IN_TIME = (1.0, 0.7, 1.3)
"""Shares of the updates that are in time by the estimate, for which sets are tried.

The estimate knows nothing of queues, and not what stays on the device.
"""


@dataclass(frozen=True)
class LateUpdate:
    """An update that the CPU may take.

    Attributes:
        node: the update's node.
        weight: the parameter.
        down: what it reads besides: the gradient, and the scale that clips it.
        time_s: its time on the CPU.
        first_use: the position among the executions at which the weight is used first.
    """

    node: ComputeNode
    weight: int
    down: tuple[int, ...]
    time_s: float
    first_use: int


def late_updates(offloader: Offloader, executions: Sequence[Execution]) -> list[LateUpdate]:
    """Return all updates that the CPU may take, in the order in which forward needs the weights."""
    program = offloader.program
    first: dict[int, int] = {}
    for position, execution in enumerate(executions):
        node = program.nodes[execution.node]
        if node.phase != "update":
            for storage in offloader.movable.intersection(node.reads):
                first.setdefault(storage, position)
    completed = {s for n in program.nodes for s in (*n.creates, *n.mutates)}
    found: list[LateUpdate] = []
    for node in program.nodes:
        time_s = offloader.cpu_update_s(node)
        weights = [s for s in node.mutates if program.storages[s].role == "parameter"]
        if node.phase != "update" or math.isinf(time_s) or len(weights) != 1 or weights[0] not in first:
            continue
        down = [s for s in node.reads if s not in node.mutates]
        gradients = [s for s in down if s not in offloader.clipping]
        if len(gradients) == 1 and gradients[0] in completed and _has_a_place(offloader, gradients[0]):
            found.append(LateUpdate(node, weights[0], tuple(down), time_s, first[weights[0]]))
    return sorted(found, key=lambda u: (u.first_use, u.node.node))


def _has_a_place(offloader: Offloader, gradient: int) -> bool:
    """Return whether a gradient has a slot; one that waits from an earlier micro-batch may have none."""
    role = offloader.program.storages[gradient].role
    return role == "temporary" or (role == "gradient" and gradient in offloader.gradients)


def sets_of_updates(
    offloader: Offloader, executions: Sequence[Execution], updates: Sequence[LateUpdate], spare_bytes: int
) -> list[tuple[LateUpdate, ...]]:
    """Return sets of updates to try, each in the order of `updates`.

    They are all updates; more than are in time by the estimate; as many; fewer.

    Args:
        offloader: the program, with the lower tier.
        executions: all executions, updates included.
        updates: the updates that the CPU may take, see `late_updates`.
        spare_bytes: device memory for weights and states that need not be offloaded.
    """
    count = in_time(offloader, executions, updates, spare_bytes)
    sizes = {min(len(updates), round(share * count)) for share in SHARES_OF_THOSE_IN_TIME} | {len(updates)}
    return [tuple(updates[len(updates) - size :]) for size in sorted(sizes - {0}, reverse=True)]


def in_time(
    offloader: Offloader, executions: Sequence[Execution], updates: Sequence[LateUpdate], spare_bytes: int
) -> int:
    """Return how many of the last updates the CPU can do in time; see `sets_of_updates`."""
    ends_in_time = _InTime(offloader, executions, updates, spare_bytes)
    low, high = 0, len(updates)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ends_in_time(middle) else (low, middle - 1)
    return low


class _InTime:
    """Tells whether the CPU is in time with the last so many updates."""

    def __init__(
        self, offloader: Offloader, executions: Sequence[Execution], updates: Sequence[LateUpdate], spare_bytes: int
    ) -> None:
        nodes, self._size, self._link = offloader.program.nodes, offloader.program.nbytes, offloader.lower_tier.link
        self._updates = updates
        self._spare_bytes = spare_bytes
        taken = {u.node.node for u in updates}
        times = [0.0 if e.node in taken else nodes[e.node].time_s for e in executions]
        self._clock = np.concatenate([[0.0], np.cumsum(times)])

    def _end_s(self, device: Sequence[LateUpdate]) -> float:
        """Return the time of the updates that the device does.

        Weight, states and gradient are reloaded, and the former two are offloaded again.
        """
        kept = sum(self._size[s] for u in device for s in u.node.mutates)
        gradients = sum(max(self._size[s] for s in u.down) for u in device)
        moving = max(0, kept + gradients - self._spare_bytes)
        share = moving / max(kept + gradients, 1)
        up_s = moving / self._link.reload_bytes_per_s
        down_s = share * kept / self._link.offload_bytes_per_s
        both_s = (moving + share * kept) / self._link.duplex_bytes_per_s
        return max(sum(u.node.time_s for u in device), up_s, down_s, both_s)

    def __call__(self, count: int) -> bool:
        first = len(self._updates) - count
        end_s = self._end_s(self._updates[:first])
        done_s = 0.0
        for update in self._updates[first:]:
            done_s += update.time_s
            copy_s = self._size[update.weight] / self._link.reload_bytes_per_s
            if done_s > end_s + float(self._clock[update.first_use]) - copy_s:
                return False
        return True
