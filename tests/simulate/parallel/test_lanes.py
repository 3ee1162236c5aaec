"""The lanes of a rank, by cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from stowage.stages.simulate.parallel.lanes import LaneRules, Lanes, Use


def time_of(rules: LaneRules, *phases: list[Use]) -> float:
    lanes = Lanes(rules)
    for phase in phases:
        lanes.run(phase)
    return lanes.end_s


GATHERED = Use(compute_s=3.0, gather_s=2.0)


@pytest.mark.parametrize(
    ("rules", "seconds"),
    [
        (LaneRules(ahead=0), 3 * (2 + 3)),
        (LaneRules(ahead=1), 2 + 3 * 3),
        (LaneRules(ahead=1, slowdown=0.5), 2 + 3 * (3 + 1)),
    ],
)
def test_a_gather_ahead_hides_behind_computing(rules: LaneRules, seconds: float) -> None:
    assert time_of(rules, [GATHERED] * 3) == seconds


def test_the_lane_of_collectives_is_the_longest_where_gathers_are_slow() -> None:
    assert time_of(LaneRules(ahead=1), [Use(1.0, gather_s=2.0)] * 3) == 3 * 2 + 1


def test_no_gather_of_a_phase_starts_before_the_phase() -> None:
    assert time_of(LaneRules(ahead=1), [Use(1.0)], [Use(1.0, gather_s=2.0)]) == 1 + 2 + 1


def test_a_reduction_hides_unless_computing_waits_for_it() -> None:
    uses = [Use(3.0, reduce_s=2.0)] * 2
    assert time_of(LaneRules(), uses) == 3 + 3 + 2
    assert time_of(LaneRules(reduce_waits=True), uses) == 2 * (3 + 2)


def test_an_offload_follows_its_reduction() -> None:
    uses = [Use(1.0, reduce_s=2.0, offload_s=4.0)] * 2
    assert time_of(LaneRules(), uses) == 1 + 2 + 4 + 4
    assert time_of(LaneRules(reduce_waits=True, offload_waits=True), uses) == 2 * (1 + 2 + 4)


def test_a_reload_precedes_its_gather() -> None:
    assert time_of(LaneRules(ahead=0), [Use(1.0, reload_s=2.0, gather_s=3.0)]) == 2 + 3 + 1


def test_one_link_does_one_thing_at_a_time() -> None:
    uses = [Use(1.0, reload_s=2.0, gather_s=3.0)] * 2
    assert time_of(LaneRules(ahead=2), uses) == 2 + 3 + 3 + 1
    assert time_of(LaneRules(ahead=2, shared_link=True), uses) == 2 * (2 + 3) + 1


def test_what_is_kept_does_not_wait_for_the_lanes() -> None:
    busy, kept = Use(1.0, reduce_s=10.0), Use(1.0)
    lanes = Lanes(LaneRules())
    lanes.run([busy, kept])
    assert lanes.computed == 2
    assert lanes.end_s == 11
