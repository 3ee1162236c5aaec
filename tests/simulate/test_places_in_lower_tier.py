"""The referee on a plan that keeps a weight on the disk behind the host: time, room, and updates there."""

from __future__ import annotations

from typing import Any

import pytest

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.machine import Link, TierState
from stowage.stages.ir.step import Step
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.simulate.plan import Outcome, replay_plan
from tests.simulate.small_plans import GRADIENT, KEEP, NODES, STORAGES, WEIGHT, X, Y

LINK = Link(1000.0, 1000.0)
DISK = Link(100.0, 200.0)
OFFLOADED = frozenset({WEIGHT})


def step(action: str, storage: int) -> Step:
    return Step(-1, storage, "row", action)  # type: ignore[arg-type]


def compute(*nodes: int) -> list[Step]:
    return [Step(n, -1, "row") for n in nodes]


def on_device(*, start: TierState, **tier: Any) -> Outcome:
    """The weight comes up before forward, is dropped after it, comes up for its update, and goes down."""
    rows = [step("reload", WEIGHT), step("wait", WEIGHT), *compute(0), step("free", WEIGHT), *compute(1, 2, 3)]
    rows += [step("free", X), step("free", Y), step("reload", WEIGHT), step("wait", WEIGHT), *compute(4)]
    rows += [step("free", GRADIENT), step("offload", WEIGHT), step("wait", WEIGHT), step("free", WEIGHT)]
    return replay_plan(STORAGES, NODES, rows, keep=KEEP, start=start, tier=ReplayedTier(LINK, **tier))


def test_a_weight_in_the_host_and_one_on_the_disk() -> None:
    computing = sum(n.time_s for n in NODES)
    host = on_device(disk=DISK, start=TierState(OFFLOADED, copied=OFFLOADED))
    assert (host.time_s, host.lower_tier_bytes, host.disk_bytes) == (pytest.approx(computing + 3.0), 1000, 0)
    disk = on_device(disk=DISK, start=TierState(OFFLOADED, copied=OFFLOADED, on_disk=OFFLOADED))
    assert (disk.time_s, disk.lower_tier_bytes, disk.disk_bytes) == (
        pytest.approx(computing + 5.0 + 5.0 + 10.0),
        1000,
        1000,
    )
    assert disk.peak_bytes == host.peak_bytes
    assert disk.wait_s == pytest.approx(20.0)


def test_what_has_no_room_in_the_lower_tier_is_refused() -> None:
    there = TierState(OFFLOADED, copied=OFFLOADED, on_disk=OFFLOADED)
    on_device(disk=DISK, start=there, host_room_bytes=0, disk_room_bytes=1000)
    with pytest.raises(IllegalPlanError, match="in the disk needs 1000 bytes, and 999"):
        on_device(disk=DISK, start=there, disk_room_bytes=999)
    with pytest.raises(IllegalPlanError, match="in the host needs 1000 bytes, and 999"):
        on_device(disk=DISK, start=TierState(OFFLOADED, copied=OFFLOADED), host_room_bytes=999, disk_room_bytes=0)


def updated_by_the_cpu(*, start: TierState, **tier: Any) -> Outcome:
    """The gradient goes down, and the CPU updates the weight where it is."""
    rows = [step("reload", WEIGHT), step("wait", WEIGHT), *compute(0), step("free", WEIGHT), *compute(1, 2, 3)]
    rows += [step("free", X), step("free", Y), step("offload", GRADIENT), step("wait", GRADIENT)]
    rows += [step("free", GRADIENT), Step(4, WEIGHT, "row", "update"), step("wait", WEIGHT)]
    found = ReplayedTier(LINK, cpu_update_s={4: 32.0}, **tier)
    return replay_plan(STORAGES, NODES, rows, keep=KEEP, start=start, tier=found)


def test_an_update_of_a_weight_on_the_disk() -> None:
    host = updated_by_the_cpu(disk=DISK, start=TierState(OFFLOADED, copied=OFFLOADED))
    assert host.time_s == pytest.approx(1.0 + 15.0 - 1.0 + 1.0 + 1.0 + 32.0)
    disk = updated_by_the_cpu(disk=DISK, start=TierState(OFFLOADED, copied=OFFLOADED, on_disk=OFFLOADED))
    assert disk.time_s == pytest.approx(5.0 + 15.0 + 1.0 + 5.0 + 32.0 + 10.0)
    update = next(r for r in disk.rows if r.action == "update")
    assert update.end_s - update.start_s == pytest.approx(47.0)
    # The gradient in the host, and the weight while it is updated.
    there = TierState(OFFLOADED, copied=OFFLOADED, on_disk=OFFLOADED)
    updated_by_the_cpu(disk=DISK, start=there, host_room_bytes=2000)
    with pytest.raises(IllegalPlanError, match="in the host needs 2000"):
        updated_by_the_cpu(disk=DISK, start=there, host_room_bytes=1999)


def test_what_is_being_updated_when_the_iteration_ends_has_a_place_too() -> None:
    rows = [step("wait", WEIGHT), step("reload", WEIGHT), step("wait", WEIGHT), *compute(0), step("free", WEIGHT)]
    rows += [*compute(1, 2, 3), step("free", X), step("free", Y), step("offload", GRADIENT), step("wait", GRADIENT)]
    rows += [step("free", GRADIENT), Step(4, WEIGHT, "row", "update")]
    start = TierState(offloaded=OFFLOADED, updating=OFFLOADED, on_disk=OFFLOADED)
    tier = ReplayedTier(LINK, DISK, cpu_update_s={4: 32.0})
    found = replay_plan(STORAGES, NODES, rows, keep=KEEP, start=start, tier=tier)
    assert (found.lower_tier_bytes, found.disk_bytes) == (2000, 1000)
    assert found.time_s == pytest.approx(47.0 + 5.0 + 15.0 + 1.0), "the next one waits for it"
