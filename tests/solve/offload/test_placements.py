"""Which storages go to the disk behind the host, by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step
from stowage.stages.solve.offload.placements import MovingStorage, storages_on_disk
from tests.simulate.small_plans import GRADIENT, NODES, STORAGES, WEIGHT, X

SIZES = [10, 20, 30, 40]
MOVING = MovingStorage(Counter({0: 3, 1: 2, 2: 1, 3: 2}), frozenset(), 0)
NONE = frozenset[int]()


def test_with_room_for_everything_nothing_is_on_the_disk() -> None:
    assert storages_on_disk(MOVING, SIZES, frozenset({0, 3}), 100) == NONE


def test_what_is_copied_least_goes_first_the_largest_of_equals() -> None:
    assert storages_on_disk(MOVING, SIZES, NONE, 99) == {2}
    assert storages_on_disk(MOVING, SIZES, NONE, 70) == {2}
    assert storages_on_disk(MOVING, SIZES, NONE, 69) == {3}, "2 comes back: there is room when 3 has left"
    assert storages_on_disk(MOVING, SIZES, NONE, 29) == {1, 2, 3}
    assert storages_on_disk(MOVING, SIZES, NONE, 9) == {0, 1, 2, 3}


def test_what_is_wanted_there_goes_there_unless_there_is_room() -> None:
    assert storages_on_disk(MOVING, SIZES, frozenset({3}), 60) == {3}
    assert storages_on_disk(MOVING, SIZES, frozenset({0, 1, 2, 3}), 69) == {1, 2}, "0 and 3 come back, copied most"
    assert storages_on_disk(MOVING, SIZES, frozenset({7}), 99) == {2}


def test_gradients_stay_in_the_host_and_updates_have_room_there() -> None:
    moving = replace(MOVING, gradients=frozenset({2}))
    assert storages_on_disk(moving, SIZES, frozenset({2, 3}), 60) == {3}
    assert storages_on_disk(moving, SIZES, NONE, 0) == {0, 1, 3}
    assert storages_on_disk(replace(MOVING, update_bytes=29), SIZES, NONE, 99) == {2}
    assert storages_on_disk(replace(MOVING, update_bytes=30), SIZES, NONE, 99) == {3}
    assert storages_on_disk(replace(MOVING, update_bytes=50), SIZES, NONE, 100) == NONE


def test_what_a_plan_moves() -> None:
    offloaded = TierState(frozenset({WEIGHT}), copied=frozenset({WEIGHT}))
    rows = [Step(-1, WEIGHT, "", "reload"), Step(-1, X, "", "offload"), Step(-1, X, "", "reload")]
    sizes = [s.nbytes for s in STORAGES]
    assert MovingStorage.of(rows, offloaded, NODES, sizes) == MovingStorage(Counter({WEIGHT: 1, X: 2}), frozenset(), 0)
    rows += [Step(-1, GRADIENT, "", "offload"), Step(4, WEIGHT, "", "update")]
    found = MovingStorage.of(rows, offloaded, NODES, sizes)
    assert found == MovingStorage(Counter({WEIGHT: 3, X: 2, GRADIENT: 1}), frozenset({GRADIENT}), 1000)
