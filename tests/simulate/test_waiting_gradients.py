"""The referee on gradients that wait from earlier micro-batches: in memory from the start, spent by their update."""

from __future__ import annotations

import pytest

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.simulate.plan import Outcome, replay_plan
from tests.simulate.small_plans import KEEP, NODES, STORAGES, WEIGHT, node, steps, storage

WAITING, GRADIENT = 5, 4
ADDED = [*STORAGES, storage(WAITING, 1000, "gradient", "waiting")]
ADD = node(4, [GRADIENT, WAITING], [], phase="update", mutates=(WAITING,), once=True, name="add")
UPDATE = node(5, [WAITING, WEIGHT], [], phase="update", mutates=(WEIGHT,), once=True, workspace_bytes=500)
MIDDLE, LAST = [*NODES[:4], ADD], [*NODES[:4], ADD, UPDATE]


def middle(text: str) -> Outcome:
    return replay_plan(ADDED, MIDDLE, steps(text), keep=KEEP | {WAITING})


def last(text: str) -> Outcome:
    return replay_plan(ADDED, LAST, steps(text), keep=KEEP)


def test_a_middle_micro_batch_by_hand() -> None:
    outcome = middle("0 1 2 3 -1 -2 4 -4")
    assert outcome.baseline_bytes == 2000
    assert outcome.peak_bytes == 2000 + 10 + 20 + 1 + 1000
    assert outcome.rows[-1].resident_bytes == 2001
    assert {o.name for o in outcome.occupants} == {"weight", "waiting", "x", "y", "loss", "gradient"}


def test_the_last_micro_batch_by_hand() -> None:
    outcome = last("0 1 2 3 -1 -2 4 -4 5 -5")
    assert outcome.baseline_bytes == 2000
    assert outcome.rows[-2].peak_bytes == 2000 + 1 + 500
    assert outcome.rows[-1].resident_bytes == 1001


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0 1 2 3 -1 -2 4 -4 5", r"ends with the wrong storages in memory: \['waiting'\]"),
        ("0 1 2 3 -1 -2 -5 4 -4 5", r"node add reads waiting, not in memory"),
        ("0 1 2 3 -1 -2 4 -4 -5 5", r"reads waiting, not in memory"),
        ("0 1 2 3 -1 -2 4 4 -4 5 -5", r"node add may run only once"),
    ],
)
def test_each_rule(text: str, sentence: str) -> None:
    with pytest.raises(IllegalPlanError, match=sentence):
        last(text)


def test_a_gradient_that_goes_on_waiting_is_not_freed() -> None:
    with pytest.raises(IllegalPlanError, match="waiting: it has no copy in the lower tier that is up to date"):
        middle("0 1 2 3 -1 -2 4 -4 -5")
