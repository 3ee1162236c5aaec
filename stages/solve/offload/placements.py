"""Decides where offloaded storages are placed: in the host, and on the disk behind it what has no room there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stowage.stages.ir.actions import ACTIONS
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step
from stowage.stages.solve.offload.tier import LowerTier


@dataclass(frozen=True)
class MovingStorage:
    """Counts what a plan transfers.

    Attributes:
        copies: storage -> transfers of it, and reads by updates, in one iteration, for all that has a slot.
        gradients: gradients that are only offloaded, for updates by the CPU: they stay in the host.
        update_bytes: the most that an update by the CPU changes.
    """

    copies: Counter[int]
    gradients: frozenset[int]
    update_bytes: int

    @staticmethod
    def of(
        steps: Sequence[Step], state: TierState, nodes: Sequence[ComputeNode], sizes: Sequence[int]
    ) -> MovingStorage:
        """Count what a plan transfers that has no placements yet."""
        copies = Counter(dict.fromkeys(state.offloaded | state.copied, 0))
        copies.update(s.storage for s in steps if ACTIONS[s.kind].transfers)
        gradients: set[int] = set()
        update_bytes = 0
        for node in (nodes[s.node] for s in steps if s.kind == "update"):
            changed = copies.keys() & set(node.mutates)
            copies.update(dict.fromkeys(changed, 2))
            gradients |= copies.keys() & (set(node.reads) - set(node.mutates))
            update_bytes = max(update_bytes, sum(sizes[s] for s in changed))
        return MovingStorage(copies, frozenset(gradients), update_bytes)


def places_on_disk(
    tier: LowerTier,
    steps: Sequence[Step],
    state: TierState,
    nodes: Sequence[ComputeNode],
    sizes: Sequence[int],
    wanted: frozenset[int],
) -> frozenset[int]:
    """Return the storages of a plan whose placement is a disk.

    Args:
        tier: the lower tier.
        steps: the rows of the plan.
        state: where storages are when an iteration starts.
        nodes: the program.
        sizes: bytes of each of its storages.
        wanted: storages that should be on the disk rather than in the host.
    """
    if tier.placement == "host" and tier.disk is None:
        return frozenset()
    moving = MovingStorage.of(steps, state, nodes, sizes)
    if tier.placement == "disk":
        return frozenset(moving.copies)
    return storages_on_disk(moving, sizes, wanted, tier.capacity_bytes)


def storages_on_disk(
    moving: MovingStorage, sizes: Sequence[int], wanted: frozenset[int], host_bytes: int
) -> frozenset[int]:
    """Choose the storages that are placed on the disk behind the host.

    What is wanted there is placed there first; then, while the host is too full, what is copied least; and what is
    copied most returns to the host while there is room. An update of what is on the disk reads it into the host: room
    is left for that.

    Args:
        moving: the transfers of the plan.
        sizes: bytes of each storage.
        wanted: a first choice.
        host_bytes: room in the host.
    """
    everything = moving.copies.keys() - moving.gradients
    on_disk = set(everything & wanted)
    room = host_bytes - sum(sizes[s] for s in moving.copies if s not in on_disk)
    if sum(sizes[s] for s in moving.copies) > host_bytes:
        room -= moving.update_bytes
    for storage in sorted(everything - on_disk, key=lambda s: (moving.copies[s], -sizes[s], s)):
        if room >= 0:
            break
        on_disk.add(storage)
        room += sizes[storage]
    for storage in sorted(on_disk, key=lambda s: (-moving.copies[s], -sizes[s], s)):
        if sizes[storage] <= room:
            on_disk.discard(storage)
            room -= sizes[storage]
    return frozenset(on_disk)
