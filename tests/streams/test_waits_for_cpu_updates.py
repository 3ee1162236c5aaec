"""The model finds a missing wait for an update by the CPU even where a thread of the disk tells the host by chance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stowage.stages.device.tiers import HostAndDiskTier
from stowage.stages.runtime.offload import cpu_updates
from tests.streams.checking import ORDERS, tier_on
from tests.streams.device_mode import DeviceMode
from tests.streams.disk_turns import UPDATES, taking_turns
from tests.streams.machine import HOST, Machine

CPU = torch.device("cpu")


def races_of_a_reload(machine: Machine, folder: Path, *, waits: bool, told: bool) -> list[str]:
    """Update a weight in the host by the CPU and reload it, and say what is wrong with that.

    Args:
        machine: the order in which things happen.
        folder: where the disk is.
        waits: whether the host waits for the update in between.
        told: whether the host waits in between for a reload from the disk. The disk's thread may have read a state for
            the next update by then, and knows in that case that the update of the weight is done.
    """
    like = torch.empty(4, dtype=torch.float32, device="meta")
    with taking_turns(machine):
        tier = tier_on(machine, folder)
        assert isinstance(tier, HostAndDiskTier)
        with DeviceMode(machine):
            tier.reserve({"weight": 16, "state": 16, "other": 16}, on_disk=("state", "other"))
            for name in ("weight", "state", "other"):
                tier.offload(name, torch.ones(4, device=CPU)).wait()
            worker = cpu_updates.ThreadPoolExecutor(max_workers=1, thread_name_prefix="")
            update = worker.submit(lambda: tier.content("weight", like).add_(1))
            worker.submit(lambda: tier.content("state", like))
            machine.record("compute")  # in some orders threads go on here
            if told:
                tier.reload("other", torch.empty(4, device=CPU)).wait()
            machine.ignored = set() if waits else {(HOST, UPDATES)}
            update.result()
            machine.ignored = set()
            tier.reload("weight", torch.empty(4, device=CPU)).wait()
        machine.drain()
        tier.close()
        machine.close()
    return [*map(str, machine.shadow.races), *machine.unwritten]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_one_of_the_orders_finds_a_missing_wait(waits: bool, told: bool, tmp_path: Path) -> None:
    found = {name: races_of_a_reload(order(), tmp_path, waits=waits, told=told) for name, order in ORDERS.items()}
    assert bool(found["the host behind"]) == (not waits and not told), "what a thread tells by chance hides the race"
    assert bool(found["the host ahead"]) == (not waits), "nobody was told yet"
    for race in (race for races in found.values() for race in races):
        assert "CPU updates writes it" in race
        assert "reload reads it" in race
