"""What policies choose, and that what they choose depends on step, dynamics and seed alone."""

from __future__ import annotations

import random

import pytest

from stowage.flows import Freeze
from stowage.stages.freezing.choice import policy_of
from stowage.stages.freezing.dynamics import LARGE, Dynamics
from stowage.stages.freezing.policies import (
    POLICIES,
    Ils,
    Prefix,
    Progressive,
    Random,
    RoundRobin,
    active_count,
    most_active,
    policy_named,
)
from stowage.stages.ir.errors import ParameterError
from stowage.stages.settings import parse_settings

UNITS = {f"u{i}": float(i) for i in (3, 1, 4, 0, 5, 9, 2, 6)}


def test_the_number_of_frozen_units_is_rounded_down() -> None:
    assert [active_count(8, rate) for rate in (0.0, 0.5, 0.6, 0.95, 1.0)] == [8, 4, 4, 1, 0]


def test_ils_freezes_the_units_that_moved_least() -> None:
    assert set(Ils(0.75).choose(7, UNITS)) == {"u9", "u6"}


def test_ils_updates_every_unit_once_before_it_compares() -> None:
    dynamics, policy, seen = Dynamics(UNITS, seed=3), Ils(0.75), set()
    for step in range(4):
        active = set(policy.choose(step, dynamics.all()))
        assert not active & seen
        seen |= active
        dynamics.moved(dict.fromkeys(active, 0.1))
    assert seen == set(UNITS)


def test_random_draws_other_units_in_other_steps_and_the_same_in_the_same() -> None:
    state = random.getstate()
    drawn = [tuple(Random(0.5, seed=1).choose(step, UNITS)) for step in range(20)]
    assert random.getstate() == state
    assert len(set(drawn)) > 10
    assert drawn == [tuple(Random(0.5, seed=1).choose(step, UNITS)) for step in range(20)]
    assert drawn != [tuple(Random(0.5, seed=2).choose(step, UNITS)) for step in range(20)]


def test_progressive_freezes_more_and_more_of_the_first_units() -> None:
    policy = Progressive(0.75, over=6)
    frozen = [len(UNITS) - len(policy.choose(step, UNITS)) for step in range(8)]
    assert frozen == [0, 1, 2, 3, 4, 5, 6, 6]
    assert list(policy.choose(100, UNITS)) == list(UNITS)[6:]
    assert policy.most_active(8) == 8


def test_round_robin_trains_every_unit_in_turn() -> None:
    chosen = [name for step in range(4) for name in RoundRobin(0.75).choose(step, UNITS)]
    assert chosen == list(UNITS)


def test_prefix_trains_the_last_units_in_every_step() -> None:
    assert {tuple(Prefix(0.75).choose(step, UNITS)) for step in range(5)} == {("u2", "u6")}


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_trains_more_units_than_it_says(name: str) -> None:
    for rate in (0.0, 0.3, 0.9, 1.0):
        policy = policy_named(name, rate, seed=0)
        for step in (0, 1, 500, 5000):
            assert len(set(policy.choose(step, UNITS))) <= most_active(policy, len(UNITS), rate)


def test_dynamics_are_stored_and_restored() -> None:
    first, second = Dynamics(UNITS, seed=1), Dynamics(UNITS, seed=2)
    assert first.all() != second.all()
    assert max(first.all().values()) <= LARGE
    first.moved({"u3": 0.25, "other": 1.0})
    second.load_state_dict(first.state_dict())
    assert second.all() == first.all()
    assert list(second.all()) == list(UNITS)
    assert second.all()["u3"] == 0.25


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ParameterError, match=r"freeze\.policy is 'best': write one of ils, random"):
        policy_named("best", 0.5, 0)


def test_progressive_takes_the_steps_that_it_is_given() -> None:
    """Through `Freeze`, and through `params.yaml`; without any it takes a thousand."""
    settings = parse_settings(
        {
            "trace": {"model": {"architecture": "gpt2"}},
            "solve": {"freeze": {"policy": "progressive", "rate": 0.75, "over": 6}},
        }
    )
    assert settings.solve.freeze is not None
    for policy in (
        Freeze(0.75, "progressive", over=6).freezing().policy,
        policy_of(settings.solve.freeze.choice()),
    ):
        assert policy == Progressive(0.75, over=6)
        assert [len(UNITS) - len(policy.choose(step, UNITS)) for step in (0, 3, 6, 60)] == [0, 3, 6, 6]
    assert Freeze(0.75, "progressive").freezing().policy == Progressive(0.75, over=1000)
    texts = {Freeze(0.75, "progressive", over=over).text() for over in (5, 6)}
    assert len(texts) == 2, "a checkpoint of one is none of the other"
    assert len({Freeze(0.75, "ils", over=over).text() for over in (5, 6)}) == 1


@pytest.mark.parametrize("over", [0, -3, 2.5, True, "6"])
def test_over_is_a_number_of_steps(over: object) -> None:
    with pytest.raises(ParameterError, match=r"freeze\.over is .*at least 1"):
        Freeze(0.75, "progressive", over=over)  # type: ignore[arg-type]
