"""Which tiers the arguments allow on which device, and what is said where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.machine import DISK_ALIGNMENT_BYTES, DISK_STAGING_BYTES, BehindHost, Link
from stowage.stages.solve import LowerTier, lower_tier_of

CPU = DeviceDescription("c", "a processor", "cpu", 1 << 34, 1e10, 1e10, 3e9, 2e9, 4e9, 1e9, 1e-6)
GPU = replace(
    CPU,
    name="a card",
    type="cuda",
    offload_bytes_per_s=1e10,
    reload_bytes_per_s=1.1e10,
    duplex_bytes_per_s=1.8e10,
    cpu_update_bytes_per_s=5e9,
)
DISK = Link(2e9, 3e9, 4e9)
PINNED = Link(1e10, 1.1e10, 1.8e10)


def tiers(target: DeviceDescription, **given: Any) -> LowerTier | None:
    return lower_tier_of(target, **({"host_budget": None, "disk_budget": None, "offload_dir": None} | given))


def test_the_tiers_of_each_machine(tmp_path: Path) -> None:
    assert tiers(CPU) is None
    assert tiers(GPU) is None
    disk = tiers(CPU, offload_dir=tmp_path, disk_budget="1GiB")
    assert disk == LowerTier(DISK, 1 << 30, DISK_STAGING_BYTES, DISK_ALIGNMENT_BYTES, placement="disk")
    host = tiers(GPU, host_budget="2GiB")
    assert host == LowerTier(PINNED, 2 << 30, cpu_update_bytes_per_s=5e9, dispatch_s=1e-6)
    shared = tiers(replace(GPU, collectives_share_link=True), host_budget="2GiB")
    assert shared == replace(host, link=replace(PINNED, carries_collectives=True))
    both = tiers(GPU, host_budget="2GiB", offload_dir=tmp_path, disk_budget="1GiB")
    assert both == replace(host, capacity_bytes=(2 << 30) - DISK_STAGING_BYTES, disk=BehindHost(DISK, 1 << 30))
    assert both is not None
    assert both.staging_bytes == 0, "the buffers are in the host"


def test_room_on_a_disk_is_what_is_free(tmp_path: Path) -> None:
    both = tiers(GPU, host_budget="2GiB", offload_dir=tmp_path / "made")
    assert both is not None
    assert both.disk is not None
    assert 0 < both.disk.capacity_bytes < 1 << 50
    assert both.disk_room_bytes == both.disk.capacity_bytes
    assert (tmp_path / "made").is_dir()
    elsewhere = tiers(GPU, host_budget="2GiB", offload_dir=tmp_path / "none", disk_budget="1PiB", here=False)
    assert elsewhere is not None
    assert elsewhere.disk_room_bytes == 1 << 50
    assert not (tmp_path / "none").exists()


def test_what_lasts_is_not_the_room_on_a_disk(tmp_path: Path) -> None:
    one = tiers(GPU, host_budget="2GiB", offload_dir=tmp_path, disk_budget="1GiB")
    two = tiers(GPU, host_budget="2GiB", offload_dir=tmp_path, disk_budget="2GiB")
    three = tiers(GPU, host_budget="3GiB", offload_dir=tmp_path, disk_budget="2GiB")
    assert one is not None
    assert two is not None
    assert three is not None
    assert one.lasting() == two.lasting() != three.lasting()
    host = tiers(GPU, host_budget="2GiB")
    assert host is not None
    assert (host.lasting(), host.disk_room_bytes) == (host, None)


@pytest.mark.parametrize(
    ("target", "given", "said"),
    [
        (CPU, {"host_budget": "1GiB"}, "host_budget is for models on a GPU"),
        (CPU, {"disk_budget": "1GiB"}, "disk_budget needs offload_dir"),
        (GPU, {"host_budget": "1GiB", "disk_budget": "1GiB"}, "disk_budget needs offload_dir"),
        (GPU, {"offload_dir": "."}, "offload_dir needs host_budget on a GPU"),
        (GPU, {"method": "offmate"}, "give host_budget"),
        (GPU, {"host_budget": "1MiB", "offload_dir": "."}, "too small for the buffers .* give at least 16.0 MiB"),
        (replace(GPU, offload_bytes_per_s=0.0), {"host_budget": "1GiB"}, "not known of a card"),
    ],
)
def test_each_mistake_is_one_sentence(target: DeviceDescription, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        tiers(target, **given)
