"""Device, host and the disk behind it: no number changes, whichever of them something lives in."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from stowage.stages.codegen import emit_step
from stowage.stages.device.tiers import DelayedTier, NullTier, Tier
from stowage.stages.device.tiers.base import Stream
from stowage.stages.ir.machine import BehindHost, Link
from stowage.stages.ir.plan import Slot
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.solve import LowerTier
from stowage.stages.solve.summary import Solved
from tests.device.tiers.thread_lanes import host_and_disk
from tests.offload.test_offloaded_training import OPTIMIZERS, adamw, momentum, prepared_for, without_waits
from tests.offload.with_lower_tier import LOWER_TIER, actions, assert_equal_with_lower_tier, solve_with_lower_tier
from tests.zoo import ZOO

DISK = BehindHost(Link(5e8, 5e8, 8e8), 1 << 40)
SLOW = BehindHost(Link(2e7, 2e7, 4e7), 1 << 40)
CPU = 1e10


@cache
def three_tiers(
    name: str, optimizer: str, cpu: float = 0.0, share: float = 0.6, disk: BehindHost = DISK
) -> tuple[LowerTier, Solved]:
    """A plan where parameters and states do not fit the device, and a share of them fits the host."""
    prepared = prepared_for(name, optimizer)
    state = sum(s.nbytes for s in prepared.trace.storages if s.role in ("parameter", "state"))
    lower_tier = replace(LOWER_TIER, cpu_update_bytes_per_s=cpu, capacity_bytes=int(share * state), disk=disk)
    return lower_tier, solve_with_lower_tier(prepared, int(0.8 * state), lower_tier=lower_tier)


def roles_at(slots: list[Slot], placement: str) -> Counter[str]:
    """Bytes of each role in a place."""
    found: Counter[str] = Counter()
    for slot in slots:
        if slot.placement == placement:
            found[slot.role] += slot.nbytes
    return found


@pytest.mark.parametrize(("name", "optimizer", "share"), [("gpt2", "adamw", 0.6), ("llama", "momentum", 0.3)])
def test_equal_to_eager_from_both(name: str, optimizer: str, share: float, tmp_path: Path) -> None:
    lower_tier, solved = three_tiers(name, optimizer, share=share)
    for placement in ("host", "disk"):
        assert roles_at(solved.slots, placement).keys() >= {"parameter", "state"}
    assert 0 < roles_at(solved.slots, "host").total() <= lower_tier.capacity_bytes
    assert solved.summary.disk_bytes == roles_at(solved.slots, "disk").total()
    tier = host_and_disk(tmp_path)
    assert_equal_with_lower_tier(ZOO[name], prepared_for(name, optimizer), solved, tier, OPTIMIZERS[optimizer])
    assert tier.disk.file_bytes >= solved.summary.disk_bytes
    tier.close()


def test_updates_by_the_cpu_of_what_is_on_the_disk(tmp_path: Path) -> None:
    """Weight and states are read into the host, changed, and written back, to the same bits."""
    _, solved = three_tiers("llama", "momentum", CPU)
    homes = {s.storage: s.placement for s in solved.slots}
    assert {homes[r.storage] for r in solved.rows if r.action == "update"} == {"host", "disk"}
    tier = host_and_disk(tmp_path)
    assert_equal_with_lower_tier(ZOO["llama"], prepared_for("llama", "momentum"), solved, tier, OPTIMIZERS["momentum"])
    tier.close()


@pytest.mark.parametrize("cpu", [0.0, CPU])
def test_the_order_of_verbs(cpu: float) -> None:
    """NullTier fills what is under way with NaN and checks every verb."""
    _, solved = three_tiers("llama", "momentum", cpu)
    tier = NullTier()
    assert_equal_with_lower_tier(ZOO["llama"], prepared_for("llama", "momentum"), solved, tier, momentum, iterations=3)
    assert tier.unwaited == []


@pytest.mark.parametrize("stream", ["offload", "reload"])
def test_a_late_stream_changes_nothing(stream: Stream, tmp_path: Path) -> None:
    _, solved = three_tiers("llama", "momentum", CPU)
    tier: Tier = DelayedTier(host_and_disk(tmp_path), stream, 0.005)
    assert_equal_with_lower_tier(ZOO["llama"], prepared_for("llama", "momentum"), solved, tier, momentum, iterations=2)
    tier.close()


def test_a_missing_wait_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run with the waits for reloads taken out must not give the same numbers."""
    _, solved = three_tiers("gpt2", "adamw")
    monkeypatch.setattr(Offloading, "wait", without_waits(Offloading.wait, "reloading"))
    tier: Tier = DelayedTier(host_and_disk(tmp_path), "reload", 0.05)
    with pytest.raises(AssertionError):
        assert_equal_with_lower_tier(ZOO["gpt2"], prepared_for("gpt2", "adamw"), solved, tier, adamw, iterations=2)


@pytest.mark.long
def test_less_host_memory_takes_more_disk_and_time() -> None:
    """In the same device budget; with room for everything the disk is not used."""
    plans = [three_tiers("llama", "momentum", share=share, disk=SLOW) for share in (100.0, 0.6, 0.0)]
    for lower_tier, solved in plans:
        assert roles_at(solved.slots, "host").total() <= lower_tier.capacity_bytes
    on_disk = [solved.summary.disk_bytes for _, solved in plans]
    assert 0 == on_disk[0] < on_disk[1] < on_disk[2] == plans[2][1].summary.lower_tier_bytes
    times = [solved.summary.step_time_s for _, solved in plans]
    assert times[0] < 0.9 * times[1] < 0.9 * 0.9 * times[2]
    alone = solve_with_lower_tier(prepared_for("llama", "momentum"), plans[0][1].summary.device_budget_bytes)
    assert times[0] == pytest.approx(alone.summary.step_time_s, rel=0.02)


def test_step_py_says_what_is_on_the_disk() -> None:
    prepared = prepared_for("llama", "momentum")
    _, solved = three_tiers("llama", "momentum", CPU)
    text = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, solved.slots)
    disk = {s.storage for s in solved.slots if s.placement == "disk"}
    for action, words in (("offload", "MiB down to disk,"), ("reload", "MiB up from disk,")):
        assert text.count(words) == sum(r.action == action and r.storage in disk for r in solved.rows) > 0
    assert text.count("on the CPU, from and to disk,") == sum(
        r.action == "update" and r.storage in disk for r in solved.rows
    )
    everything = [replace(s, placement="disk") for s in solved.slots]
    assert "disk" not in emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, everything)
    assert actions(solved)["update"] > 0
