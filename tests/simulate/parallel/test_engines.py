"""Memory of each engine against Table 1 of the Elixir paper, and steps that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.simulate.parallel.chunks import simulate_chunks
from stowage.stages.simulate.parallel.deepspeed import DeepSpeedSettings, pinned_bytes, simulate_zero
from stowage.stages.simulate.parallel.fsdp2 import simulate_fsdp2
from stowage.stages.simulate.parallel.replicas import simulate_ddp, simulate_one_unit

N, M = 4, 16_000
GROUPS = tuple(
    ParameterGroup(i, (f"layer.{i}",), (), M // 4, M // 4, 4, 2, 8, forward_s=1.0, backward_s=2.0, saved_bytes=0,
                   forward_peak_bytes=0, backward_peak_bytes=0)
    for i in range(4)
)  # fmt: skip
MACHINE = ParallelMachine(
    "four", N, 10**6, 10**6, 6000.0, 0.0, 16_000.0, 8000.0, 24_000.0, device_updates_per_s=64_000.0,
    host_updates_per_s=1000.0,
)  # fmt: skip
BARE = DeepSpeedSettings(reduce_elements=0, live_elements=0, sub_group_elements=0)


def choices(on_host: bool, keep: bool) -> list[GroupChoice]:
    return [GroupChoice(i, on_host, keep) for i in range(4)]


def test_ddp_has_everything() -> None:
    assert simulate_ddp(GROUPS, MACHINE, activation_bytes=7, fixed_bytes=5).device_bytes == (2 + 2 + 12) * M + 12


def test_zero_2_has_all_weights_and_a_part_of_the_rest() -> None:
    found = simulate_zero(GROUPS, MACHINE, 2, offload=False, settings=BARE, activation_bytes=10 * M)
    assert found.device_bytes == 2 * M + 14 * M // N + 10 * M
    updating = simulate_zero(GROUPS, MACHINE, 2, offload=False, settings=BARE, activation_bytes=0)
    assert updating.device_bytes == 2 * M + (14 + 2 + 4) * M // N
    offloaded = simulate_zero(GROUPS, MACHINE, 2, offload=True, settings=BARE, activation_bytes=0)
    assert offloaded.device_bytes == 2 * M


def test_zero_3_has_a_part_of_everything() -> None:
    found = simulate_zero(GROUPS, MACHINE, 3, offload=False, settings=BARE, activation_bytes=3)
    assert found.device_bytes == 16 * M // N + 3
    assert simulate_zero(GROUPS, MACHINE, 3, offload=True, settings=BARE, activation_bytes=3).device_bytes == 3


@pytest.mark.parametrize(("blocks", "on_host"), [(4, False), (1, False), (4, True), (1, True)])
def test_chunks_take_what_table_1_says(blocks: int, on_host: bool) -> None:
    found = simulate_chunks(
        GROUPS, choices(on_host, blocks == 4), MACHINE, blocks=blocks, block_elements=M // 4, activation_bytes=0
    )
    shards = (2 + 12) * M
    assert found.device_bytes == 2 * blocks * M // 4 + (0 if on_host else shards // N)
    assert found.host_bytes == (shards if on_host else 0)


def test_one_unit_has_shards_and_the_whole() -> None:
    assert simulate_one_unit(GROUPS, MACHINE, activation_bytes=0).device_bytes == 18 * M // N + 4 * M
    alone = replace(MACHINE, ranks=1)
    assert simulate_one_unit(GROUPS, alone, activation_bytes=0).device_bytes == 18 * M


def test_fsdp2_copies_stored_weights_for_every_gather() -> None:
    # The link is so slow that nothing else counts: 8 bytes an element up, or 4 where it is kept; 4 down.
    slow = replace(MACHINE, reload_bytes_per_s=1.0, offload_bytes_per_s=1e12, duplex_bytes_per_s=1e12)
    up, once = (simulate_fsdp2(GROUPS, choices(True, keep), slow) for keep in (False, True))
    assert up.time_s - once.time_s == pytest.approx(4 * M, rel=1e-2)
    assert once.time_s == pytest.approx(4 * M, rel=1e-2)
    back = replace(MACHINE, reload_bytes_per_s=1e12, offload_bytes_per_s=1.0, duplex_bytes_per_s=1e12)
    assert simulate_fsdp2(GROUPS, choices(True, True), back).time_s == pytest.approx(4 * M, rel=1e-2)
    half = tuple(replace(g, stored_bytes=2) for g in GROUPS)
    assert simulate_fsdp2(half, choices(True, True), slow).time_s == pytest.approx(2 * M, rel=1e-2)


def test_frozen_groups_have_no_gradients_no_states_and_no_updates() -> None:
    frozen = tuple(replace(g, trainable=0) for g in GROUPS)
    found = simulate_fsdp2(frozen, choices(True, True), MACHINE)
    assert found.host_bytes == 4 * M
    assert found.update_s == 0
    assert simulate_fsdp2(GROUPS, choices(True, True), MACHINE).host_bytes == (4 + 4 + 8) * M


def test_micro_batches_copy_anew_and_update_once() -> None:
    two, three = (simulate_fsdp2(GROUPS, choices(True, False), MACHINE, micro_batches=k) for k in (2, 3))
    assert three.update_s == two.update_s == M / 1000
    assert (three.time_s - three.update_s) / 3 == pytest.approx((two.time_s - two.update_s) / 2)


def test_with_micro_batches_backward_waits_for_the_host() -> None:
    one, two = (simulate_fsdp2(GROUPS, choices(True, True), MACHINE, micro_batches=k) for k in (1, 2))
    # A layer's backward 2 s, its reduction 1 s, its offload 2 s: alone they overlap.
    assert (two.time_s - two.update_s) / 2 - (one.time_s - one.update_s) == pytest.approx(3 * (1 + 2))
    on_device = [simulate_fsdp2(GROUPS, choices(False, True), MACHINE, micro_batches=k) for k in (1, 2)]
    assert on_device[1].time_s - on_device[0].time_s == pytest.approx(on_device[0].time_s - on_device[0].update_s)


def test_an_offloaded_step_waits_for_the_updates_of_the_host() -> None:
    found = simulate_zero(GROUPS, MACHINE, 2, offload=True, settings=BARE, activation_bytes=0)
    # Forward 4 s; a layer's backward 2 s, reducing 1 s, its offload 2 s; updates 16 s, copies 2 s, a gather 4 s.
    assert found.update_s == pytest.approx(16 + 2 + 4)
    assert found.time_s == pytest.approx(4 + 4 * (2 + 1 + 2) + 22)


@pytest.mark.parametrize(("nbytes", "pinned"), [(0, 0), (1, 1), (5, 8), (8, 8), (9, 16)])
def test_pinned_memory_is_a_power_of_two(nbytes: int, pinned: int) -> None:
    assert pinned_bytes(nbytes) == pinned


def test_what_does_not_fit_is_named() -> None:
    found = simulate_ddp(GROUPS, MACHINE, activation_bytes=0)
    assert found.lacks(MACHINE) == ""
    assert found.lacks(replace(MACHINE, device_bytes=16 * M - 1)) == "device"
    assert replace(found, host_bytes=10**7).lacks(MACHINE) == "host"
