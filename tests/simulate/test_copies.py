"""Copies and updates beside computing, worked out by hand: links that are shared, and the disk behind the host."""

from __future__ import annotations

import pytest

from stowage.stages.ir.actions import LaneName
from stowage.stages.ir.machine import Link
from stowage.stages.simulate.copies import Copies

LINK = Link(10.0, 20.0, 25.0)
DISK = Link(4.0, 8.0, 10.0)


def ends(copies: Copies, *wanted: tuple[float, LaneName, bool]) -> list[float]:
    """Ends of copies (bytes, lane, on disk) that all begin at 0."""
    started = [copies.copy(lane, int(n), 0.0, on_disk=on_disk) for n, lane, on_disk in wanted]
    copies.finish_all()
    return [copy.end_s for copy in started]


DOWN: LaneName = "offload"
UP: LaneName = "reload"


def test_one_direction_after_the_other_and_both_at_once() -> None:
    assert ends(Copies(LINK), (100, DOWN, False), (50, DOWN, False)) == pytest.approx([10.0, 15.0])
    # 10 and 20 wanted, 25 there: 8⅓ and 16⅔ until the reload ends after 6 s with 50 bytes moved down.
    assert ends(Copies(LINK), (100, DOWN, False), (100, UP, False)) == pytest.approx([11.0, 6.0])


def test_without_a_disk_behind_it_the_link_is_all_there_is() -> None:
    assert ends(Copies(LINK), (100, DOWN, True)) == pytest.approx([10.0])


def test_a_copy_to_the_disk_goes_at_its_rate() -> None:
    assert ends(Copies(LINK, DISK), (40, DOWN, True), (40, DOWN, True)) == pytest.approx([10.0, 20.0])
    assert ends(Copies(LINK, DISK), (40, UP, True)) == pytest.approx([5.0])


def test_the_disk_has_a_queue_of_its_own_and_takes_its_share_of_the_link() -> None:
    """4 of 10 go to the disk: the host's copy moves 60 in 10 s, and the rest alone."""
    assert ends(Copies(LINK, DISK), (40, DOWN, True), (100, DOWN, False)) == pytest.approx([10.0, 14.0])
    fast = Link(100.0, 100.0)
    assert ends(Copies(LINK, fast), (100, DOWN, True)) == pytest.approx([10.0]), "not faster than the link"
    assert ends(Copies(LINK, fast), (50, DOWN, True), (100, DOWN, False)) == pytest.approx([10.0, 15.0]), "half each"


def test_both_directions_of_the_disk_share_it() -> None:
    # 4 and 8 wanted, 10 there: 10/3 and 20/3 until the read ends after 6 s; then 20 bytes at 4.
    assert ends(Copies(LINK, DISK), (40, DOWN, True), (40, UP, True)) == pytest.approx([11.0, 6.0])


def test_both_directions_of_the_link_share_it_with_the_disk() -> None:
    # Down 4 + 6 and up 20 wanted, 25 there: all at 5/6, until the reload ends after 12 s.
    found = ends(Copies(LINK, DISK), (40, DOWN, True), (100, DOWN, False), (200, UP, False))
    assert found == pytest.approx([12.0, 16.0, 12.0])


def test_updates_take_turns() -> None:
    copies = Copies(LINK)
    one, two = copies.update("update", 3.0, 1.0), copies.update("update", 2.0, 2.0)
    copies.finish_all()
    assert (one.start_s, one.end_s, two.start_s, two.end_s) == pytest.approx((1.0, 4.0, 4.0, 6.0))
    three = copies.update("update", 1.0, 10.0)
    assert copies.finish(three) == pytest.approx(11.0)


def test_an_update_of_what_is_on_the_disk_reads_it_and_writes_it_back() -> None:
    copies = Copies(LINK, DISK)
    one = copies.update("update", 3.0, 0.0, disk_bytes=16)
    two = copies.update("update", 1.0, 0.0, disk_bytes=8)
    read = copies.copy(UP, 8, 0.0, on_disk=True)
    down = copies.copy(DOWN, 100, 0.0)
    copies.finish_all()
    assert read.end_s == pytest.approx(3.0), "after the update's read, which takes 2"
    assert down.end_s == pytest.approx(10.0), "an update does not take the link"
    assert (one.start_s, one.end_s) == pytest.approx((0.0, 2.0 + 3.0 + 4.0))
    assert (two.start_s, two.end_s) == pytest.approx((9.0, 9.0 + 1.0 + 1.0 + 2.0))


def test_updates_without_a_disk_behind_it_read_nothing() -> None:
    copies = Copies(LINK)
    assert copies.finish(copies.update("update", 3.0, 0.0, disk_bytes=16)) == pytest.approx(3.0)


def test_collectives_take_half_of_a_link_that_carries_them() -> None:
    shared = Copies(Link(10.0, 20.0, 25.0, carries_collectives=True))
    copy = shared.copy(DOWN, 100, 0.0)
    together = shared.work("collective", 5.0, 0.0)
    shared.finish_all()
    # At half their rates until the collective ends after 10 s with 50 bytes moved, then alone for 5 s.
    assert (together.end_s, copy.end_s) == pytest.approx((10.0, 15.0))

    apart = Copies(LINK)
    copy, together = apart.copy(DOWN, 100, 0.0), apart.work("collective", 5.0, 0.0)
    apart.finish_all()
    assert (together.end_s, copy.end_s) == pytest.approx((5.0, 10.0))
