"""With clipping by global norm the CPU updates too: once the norm is known, and on into the next iteration."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from stowage.stages.codegen import emit_step
from stowage.stages.device.tiers import DelayedTier, NullTier, PinnedTier, Tier
from stowage.stages.device.tiers.base import Stream
from stowage.stages.ir.errors import OffloadedError
from stowage.stages.ir.machine import BehindHost, Link
from stowage.stages.ir.updates import CLIP
from stowage.stages.runtime.offload import cpu_updates as runtime_with_lower_tier
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.solve import LowerTier, eager_peak_bytes
from stowage.stages.solve.summary import Solved
from stowage.stages.trace import MicroBatch
from tests.device.tiers.thread_lanes import ThreadLanes, host_and_disk
from tests.matrix import some
from tests.offload.test_offloaded_training import OPTIMIZERS, momentum
from tests.offload.with_lower_tier import LOWER_TIER, actions, assert_equal_with_lower_tier, solve_with_lower_tier
from tests.runtime.beside_eager import prepare
from tests.solve.prepared import Prepared
from tests.zoo import ZOO

CPU = replace(LOWER_TIER, cpu_update_bytes_per_s=1e10)
ACTIVE, INACTIVE, INFINITE = 0.25, 1e4, float("inf")


@cache
def prepared_for(name: str, optimizer: str, max_grad_norm: float) -> Prepared:
    return prepare(ZOO[name], OPTIMIZERS[optimizer], MicroBatch(max_grad_norm=max_grad_norm))


@cache
def planned(name: str, optimizer: str, max_grad_norm: float = ACTIVE, lower_tier: LowerTier = CPU) -> Solved:
    prepared = prepared_for(name, optimizer, max_grad_norm)
    return solve_with_lower_tier(
        prepared, int(0.4 * eager_peak_bytes(prepared.trace, prepared.nodes)), lower_tier=lower_tier
    )


def clip_row(prepared: Prepared, solved: Solved) -> int:
    """The row that computes the scale."""
    calls = prepared.trace.calls
    clips = {n.node for n in prepared.nodes if any(calls[c].target == CLIP for c in n.calls)}
    return next(r.row for r in solved.rows if r.action == "compute" and r.node in clips)


@pytest.mark.parametrize(
    ("name", "optimizer", "max_grad_norm"),
    some(
        product(["gpt2", "llama"], OPTIMIZERS, [ACTIVE, INACTIVE, INFINITE]),
        keep=[("gpt2", "adamw", ACTIVE), ("llama", "momentum", ACTIVE), ("llama", "momentum", INFINITE)],
    ),
)
def test_equal_to_eager(name: str, optimizer: str, max_grad_norm: float) -> None:
    """In RAM in the place of pinned memory, with threads in the place of streams."""
    prepared, solved = prepared_for(name, optimizer, max_grad_norm), planned(name, optimizer, max_grad_norm)
    assert actions(solved)["update"] >= 3
    tier = PinnedTier(lanes=ThreadLanes())
    norms = assert_equal_with_lower_tier(
        ZOO[name], prepared, solved, tier, OPTIMIZERS[optimizer], iterations=5, max_grad_norm=max_grad_norm
    )
    assert all((norm > max_grad_norm) == (max_grad_norm == ACTIVE) for norm in norms), norms
    tier.close()


@pytest.mark.parametrize("name", some(["gpt2", "llama"], keep=["gpt2"]))
def test_each_update_by_the_cpu_starts_once_the_norm_is_known(name: str) -> None:
    """And lasts into the next iteration, in which its weight is waited for."""
    prepared, solved = prepared_for(name, "adamw", ACTIVE), planned(name, "adamw")
    clip = clip_row(prepared, solved)
    updates = [r for r in solved.rows if r.action == "update"]
    assert all(r.row > clip for r in updates)
    assert {s.storage for s in solved.slots if s.start == "updating"} == {r.storage for r in updates}
    (scale,) = prepared.nodes[solved.rows[clip].node].creates
    for update in updates:
        node = prepared.nodes[update.node]
        (gradient,) = set(node.reads) - set(node.mutates) - {scale}
        down = next(r for r in solved.rows if r.action == "offload" and r.storage == gradient)
        assert down.row < clip, "it goes down as soon as it is complete"
        assert all(r.storage != gradient for r in solved.rows if r.action == "reload")
        first = next(r for r in solved.rows if r.storage == update.storage)
        assert (first.action, solved.rows[first.row].row < clip) == ("wait", True)
    assert sum(r.storage == scale and r.action == "offload" for r in solved.rows) == 1
    lower_tier = sum(s.nbytes for s in solved.slots)
    assert solved.summary.lower_tier_bytes == lower_tier, "gradients that wait in the host have room there"


def test_the_order_of_verbs() -> None:
    """NullTier fills what is under way with NaN and checks every verb."""
    tier = NullTier()
    prepared, solved = prepared_for("gpt2", "adamw", ACTIVE), planned("gpt2", "adamw")
    assert_equal_with_lower_tier(
        ZOO["gpt2"], prepared, solved, tier, OPTIMIZERS["adamw"], iterations=3, max_grad_norm=ACTIVE
    )
    assert tier.unwaited == []


@pytest.mark.parametrize("stream", ["offload", "reload"])
def test_a_late_stream_changes_nothing(stream: Stream) -> None:
    tier: Tier = DelayedTier(PinnedTier(lanes=ThreadLanes()), stream, 0.005)
    prepared, solved = prepared_for("llama", "momentum", ACTIVE), planned("llama", "momentum")
    assert_equal_with_lower_tier(ZOO["llama"], prepared, solved, tier, momentum, iterations=2, max_grad_norm=ACTIVE)
    tier.close()


def slow_worker(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Updates by the CPU start late."""
    update = runtime_with_lower_tier.CpuUpdates._update

    def late(self: object, *arguments: object) -> object:
        threading.Event().wait(seconds)
        return update(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime_with_lower_tier.CpuUpdates, "_update", late)


def test_late_updates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_worker(monkeypatch, 0.02)
    prepared, solved = prepared_for("llama", "momentum", ACTIVE), planned("llama", "momentum")
    assert_equal_with_lower_tier(
        ZOO["llama"], prepared, solved, NullTier(), momentum, iterations=3, max_grad_norm=ACTIVE
    )


def test_a_missing_wait_for_an_update_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run, in which nobody waits for updates by the CPU before their weights are reloaded."""
    slow_worker(monkeypatch, 0.02)
    wait = Offloading.wait

    def hurried(self: Offloading, name: str) -> torch.Tensor | None:
        return None if name in self._updating and not self._updating[name].done() else wait(self, name)

    monkeypatch.setattr(Offloading, "wait", hurried)
    prepared, solved = prepared_for("llama", "momentum", ACTIVE), planned("llama", "momentum")
    with pytest.raises(OffloadedError, match="is offloaded"):
        assert_equal_with_lower_tier(
            ZOO["llama"], prepared, solved, NullTier(), momentum, iterations=3, max_grad_norm=ACTIVE
        )


def test_weights_and_states_on_the_disk_behind_the_host(tmp_path: Path) -> None:
    prepared = prepared_for("llama", "momentum", ACTIVE)
    state = sum(s.nbytes for s in prepared.trace.storages if s.role in ("parameter", "state"))
    lower_tier = replace(CPU, capacity_bytes=int(0.6 * state), disk=BehindHost(Link(5e8, 5e8, 8e8), 1 << 40))
    solved = planned("llama", "momentum", ACTIVE, lower_tier)
    homes = {s.storage: s.placement for s in solved.slots}
    assert "disk" in {homes[r.storage] for r in solved.rows if r.action == "update"}
    gradients = {s.storage for s in solved.slots if s.role == "temporary"}
    assert {homes[s] for s in gradients & {s for n in prepared.nodes if n.mutates for s in n.reads}} == {"host"}
    assert sum(s.nbytes for s in solved.slots if s.placement == "host") <= lower_tier.capacity_bytes
    tier = host_and_disk(tmp_path)
    assert_equal_with_lower_tier(ZOO["llama"], prepared, solved, tier, momentum, iterations=4, max_grad_norm=ACTIVE)
    tier.close()


def test_it_is_worth_it_and_a_slow_cpu_does_less() -> None:
    """In the same budget; what the CPU cannot do in time stays on the device."""
    plans = {
        rate: planned("gpt2", "adamw", ACTIVE, replace(LOWER_TIER, cpu_update_bytes_per_s=rate))
        for rate in (0, 1e8, 1e10)
    }
    updates = {rate: actions(solved).get("update", 0) for rate, solved in plans.items()}
    assert 0 == updates[0] <= updates[1e8] < updates[1e10]
    times = {rate: solved.summary.step_time_s for rate, solved in plans.items()}
    assert times[1e10] < 0.95 * times[0]
    assert times[1e10] <= times[1e8] <= times[0]


def test_step_py_shows_it() -> None:
    prepared, solved = prepared_for("llama", "momentum", ACTIVE), planned("llama", "momentum")
    text = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, solved.slots)
    assert text.count('run.offload("scale", scale)') == 1
    assert text.count(', "scale")  # on the CPU, ') == actions(solved)["update"]
    assert (
        text.count("run.update(")
        == sum(n.phase == "update" and len(n.mutates) > 0 for n in prepared.nodes) - actions(solved)["update"]
    )
