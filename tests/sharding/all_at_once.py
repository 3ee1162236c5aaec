"""Trains recipes under plans that gather weights again, recompute activations and offload, all in one step.

The lower tier is a disk, as on a machine without a GPU, or host memory with a disk behind it, as with one; small
tensors may be offloaded too, so that tiny models do all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from stowage.flows.api import fit as _fit
from stowage.flows.api import planner
from stowage.flows.api.lower_tier import OpenableTier
from stowage.flows.api.training_step import TrainingStep
from stowage.flows.planning import costed
from stowage.flows.planning.costed import Costed, cost_step
from stowage.flows.planning.job import Costing, StepToPlan
from stowage.stages.device import device_of
from stowage.stages.device.rates.collectives import CollectiveRates
from stowage.stages.device.tiers import DiskTier
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.machine import DISK_ALIGNMENT_BYTES, BehindHost, Link
from stowage.stages.ir.trace import TraceTables
from stowage.stages.profile import CostStore, profile_variants
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.solve import LowerTier
from tests.api.host_and_disk_steps import DEVICE as MADE_UP
from tests.device.tiers.moving import PAGE
from tests.device.tiers.thread_lanes import host_and_disk
from tests.sharding.planned_beside_ddp import Compared, compare, train_by_collectives

LINK = Link(5e7, 5e7)
"""So slow that plans rather compute and gather again where they can."""

RATES = CollectiveRates(bytes_per_s=1e9, start_s=1e-5)

DEVICE = replace(MADE_UP, collective_bytes_per_s=RATES.bytes_per_s, collective_s=RATES.start_s)
"""Costs are estimated from its rates, so that no measurement decides what a plan does."""

ROOM = 1 << 40
"""Bytes on the disk, and in a host that has room for anything."""

UPDATED_BYTES_PER_S = 1e10
"""So much that plans have the CPU update what is offloaded, where it may."""

SMALLEST_BYTES = 1 << 10
"""Smaller parameters and states stay on the device."""


@dataclass
class Found:
    """What one rank found.

    Attributes:
        compared: what differs from plain PyTorch.
        gathered_again: weights of which the plan gathers again, while backward is under way, what forward has let go.
        recomputed: activations that the plan computes again.
        down, up: transfers of the plan to and from each place of the lower tier.
        by_cpu: parameters that the CPU updates.
        reloaded_for_gathers: parameters whose shards are gathered once they have been reloaded.
        exact: whether the plan changes no number.
    """

    compared: Compared
    gathered_again: list[str] = field(default_factory=list)
    recomputed: int = 0
    down: Counter[str] = field(default_factory=Counter)
    up: Counter[str] = field(default_factory=Counter)
    by_cpu: set[str] = field(default_factory=set)
    reloaded_for_gathers: set[str] = field(default_factory=set)
    exact: bool = True


@dataclass(frozen=True)
class Tiers:
    """The lower tier of a test.

    Attributes:
        folder: where its file is.
        host_bytes: room in the host, before the disk; None where the disk is all there is.
        cpu_update_bytes_per_s: as in `LowerTier`: 0 where the CPU updates nothing that the host has.
    """

    folder: Path
    host_bytes: int | None = None
    cpu_update_bytes_per_s: float = 0.0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let `fit` use this tier inside, whatever the machine has."""
        folder = self.folder / str(dist.get_rank())
        folder.mkdir(parents=True, exist_ok=True)
        if self.host_bytes is None:
            lower = LowerTier(LINK, ROOM, 4 * PAGE, DISK_ALIGNMENT_BYTES, SMALLEST_BYTES, placement="disk")
            opened = OpenableTier(lower, lambda: DiskTier(folder, chunk_bytes=PAGE))
        else:
            lower = LowerTier(
                LINK,
                self.host_bytes,
                smallest_bytes=SMALLEST_BYTES,
                cpu_update_bytes_per_s=self.cpu_update_bytes_per_s,
                disk=BehindHost(LINK, ROOM),
            )
            opened = OpenableTier(lower, lambda: host_and_disk(folder))
        device = replace(DEVICE, collective_ranks=dist.get_world_size())

        def estimated(step: StepToPlan, how: Costing) -> Costed:
            return cost_step(step, replace(how, costs="roofline", target=device))

        with (
            mock.patch.object(costed, "profile_variants", with_measured_workspaces),
            mock.patch.object(_fit, "lower_tier_for", return_value=opened),
            mock.patch.object(planner, "cost_step", estimated),
            mock.patch.object(Ranks, "rates", return_value=RATES),
        ):
            yield


def with_measured_workspaces(
    traces: Iterable[TraceTables], target: DeviceDescription, store: CostStore, *, costs: str, **more: Any
) -> list[Cost]:
    """Return estimated times with the workspaces that convolutions take here, which no rate tells."""
    traces = list(traces)
    found = profile_variants(traces, target, store, costs=costs, **more)
    if not any("convolution" in call.target for trace in traces for call in trace.calls):
        return found
    here = replace(target, fingerprint=device_of("cpu").fingerprint())
    taken = {c.signature: c for c in profile_variants(traces, here, store, costs="measured", **more)}
    return [replace(c, workspace_bytes=taken[c.signature].workspace_bytes) for c in found]


def all_at_once(
    name: str, optimizer: str, budget: str | int, stores: Path, tiers: Tiers, more: Mapping[str, Any] | None = None
) -> Found:
    """Train on this rank and beside DistributedDataParallel, and say what the plan does."""
    found = Found(Compared([], []))
    with tiers.used():
        found.compared = compare(name, optimizer, budget, stores, look=lambda step: look(step, found), **more or {})
    return found


def beside_collectives(name: str, optimizer: str, budget: str | int, stores: Path, tiers: Tiers) -> Found:
    """Train on this rank and beside the same collectives on whole gradients in plain PyTorch."""
    plain = {"reference": train_by_collectives, "wrap": lambda model: model}
    return all_at_once(name, optimizer, budget, stores, tiers, plain)


def beside_both(name: str, optimizer: str, budget: str | int, stores: Path, tiers: Tiers) -> tuple[Found, Found]:
    """Train on this rank twice by one plan: beside the same collectives, and beside DistributedDataParallel."""
    arguments = (name, optimizer, budget, stores, tiers)
    return beside_collectives(*arguments), all_at_once(*arguments)


def look(step: TrainingStep, found: Found) -> None:
    """Read from the plan's rows what it does."""
    planned = step.planned
    found.exact = step.plan.exact
    nodes = {node.node: node for node in planned.nodes}
    places = {slot.storage: slot.placement for slot in planned.slots}
    storages = planned.trace.storages
    seen: set[int] = set()
    reloaded: set[int] = set()
    backward = False
    for row in planned.rows:
        if row.action in ("offload", "reload"):
            (found.down if row.action == "offload" else found.up)[places[row.storage]] += 1
            if row.action == "reload":
                reloaded.add(row.storage)
        if row.action == "update":
            found.by_cpu |= {storages[s].name for s in nodes[row.node].mutates if storages[s].role == "parameter"}
        if row.action not in ("compute", "gather"):
            continue
        node = nodes[row.node]
        backward = backward or node.phase == "backward"
        if node.collective:
            found.reloaded_for_gathers |= {storages[s].name for s in node.reads if s in reloaded}
        if row.node in seen and node.collective and backward:
            found.gathered_again.append(node.name)
        elif row.node in seen and not node.collective:
            found.recomputed += 1
        seen.add(row.node)
