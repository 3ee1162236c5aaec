"""What ranks do together beside training: choose within budgets, refuse on all ranks at once, clip and save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import some
from tests.sharding.ranks import run_on_ranks


@pytest.fixture(scope="module")
def found(fit_stores: Path) -> Mapping[str, list[Any]]:
    """By case, what each rank found."""
    results: dict[str, list[Any]] = {}
    for result in run_on_ranks("tests.sharding.together", str(fit_stores)):
        results.setdefault(result["case"], []).append(result["found"])
    return results


def test_the_choice_uses_the_budget_and_never_exceeds_it(found: Mapping[str, list[Any]]) -> None:
    ours, theirs = found["budgets"]
    assert ours["plans"] == theirs["plans"]  # hashes among them
    plans = ours["plans"]
    assert all(plan["fits"] and plan["equal"] for plan in plans.values())
    assert plans["high"]["kept"] > plans["middle"]["kept"] > plans["low"]["kept"] >= 1


def test_a_budget_that_cannot_be_met_is_said_on_all_ranks(found: Mapping[str, list[Any]]) -> None:
    for result in found["budgets"]:
        assert "cannot be met: the smallest feasible budget is" in result["refused"]
        assert result["plain"] == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("case", "what"), [("another_batch", "tensor in the batch"), ("another_budget", "device_budget")]
)
def test_ranks_that_differ_are_found_before_they_wait(case: str, what: str, found: Mapping[str, list[Any]]) -> None:
    for sentence in found[case]:
        assert sentence.startswith(f"ParameterError: Rank 1 has another {what} than rank 0")


def test_a_rank_that_fails_stops_all_and_leaves_all_as_they_were(found: Mapping[str, list[Any]]) -> None:
    first, second = found["one_fails"]
    assert first["said"] == "StowageError: Rank 1 could not shard the model, so no rank does: RuntimeError: no room"
    assert second["said"] == "no room"
    assert first["equal"]
    assert second["equal"]


def test_ranks_begin_with_the_weights_of_the_first(found: Mapping[str, list[Any]]) -> None:
    assert found["other_weights"] == [[], []]


def test_a_model_without_weights_gets_them_after_it_was_sharded(found: Mapping[str, list[Any]]) -> None:
    assert found["late_weights"] == [True, True]


def test_the_global_norm_is_that_of_ddp_up_to_the_order_of_its_sum(found: Mapping[str, list[Any]]) -> None:
    for plain, sharded in found["clipping"]:
        assert sharded == pytest.approx(plain, rel=1e-6)


def test_micro_batches_that_are_reduced_together_are_those_of_ddp(found: Mapping[str, list[Any]]) -> None:
    for result in found["accumulating"]:
        assert result["together"] == []
        assert result["each"] < 1e-4  # a hundredth of an update, whose rate is 0.01


@pytest.mark.parametrize("ranks", some([2, 4], keep=[]))
def test_gradients_are_those_of_the_same_collective(ranks: int, fit_stores: Path) -> None:
    """Four ranks add in another order than DDP does: by at most three roundings of a float32, 2^-24 each, of sums whose
    parts may be larger than they are."""
    for result in run_on_ranks("tests.sharding.together", str(fit_stores), "collective", ranks=ranks):
        assert result["found"]["wrong"] == []
        assert result["found"]["largest"] <= (0.0 if ranks == 2 else 3 * 2.0**-24 * ranks)


def test_a_checkpoint_in_one_state_goes_on_in_another(found: Mapping[str, list[Any]]) -> None:
    assert found["saving"] == [True, True]
