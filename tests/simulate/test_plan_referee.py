"""The referee of whole plans: each rule has a plan that breaks it alone; times and bytes are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.simulate.plan import Outcome, baseline_bytes, replay_plan
from stowage.stages.simulate.replay import RANDOM_STATE_BYTES
from tests.simulate.small_plans import KEEP, LOSS, NODES, STORAGES, WEIGHT, X, Y, node, steps, storage

KEEP_ALL = "0 1 2 3 -1 -2 4 -4"
RECOMPUTE = "0 1 2 -2 1 3 -1 -2 4 -4"


def play(text: str, budget: int | None = None) -> Outcome:
    return replay_plan(STORAGES, NODES, steps(text), keep=KEEP, budget_bytes=budget)


def test_keep_all_by_hand() -> None:
    outcome = play(KEEP_ALL)
    assert outcome.baseline_bytes == 1000
    assert outcome.time_s == outcome.once_time_s == 31.0
    # Update: weight, loss, gradient, workspace. Node 3 needs 1000 + 10 + 20 + 1 + 1000.
    assert outcome.peak_bytes == 1000 + 1 + 1000 + 500
    assert outcome.peak_row == 6
    assert outcome.activation_bytes == 10 + 20
    assert outcome.recomputed_bytes == 0
    assert [r.resident_bytes for r in outcome.rows] == [1010, 1030, 1031, 2031, 2021, 2001, 2001, 1001]
    assert [r.peak_bytes for r in outcome.rows] == [1017, 1030, 1031, 2031, 2021, 2001, 2501, 1001]
    assert [(r.start_s, r.end_s) for r in outcome.rows[:4]] == [(0, 1), (1, 3), (3, 7), (7, 15)]
    assert [r.row for r in outcome.rows] == list(range(8))
    assert not any(r.recompute for r in outcome.rows)
    tensors = {("weight", 1000), ("gradient", 1000), ("loss", 1)}
    assert {(o.name, o.nbytes) for o in outcome.occupants} == {*tensors, ("workspace of n4", 500)}
    assert outcome.occupants[0].nbytes == 1000


def test_recomputation_by_hand() -> None:
    outcome = play(RECOMPUTE)
    assert outcome.time_s == 33.0
    assert outcome.once_time_s == 31.0
    assert outcome.recomputed_bytes == 20
    assert [r.recompute for r in outcome.rows if r.action == "compute"] == [False, False, False, True, False, False]


def test_what_only_forward_reads_is_no_activation() -> None:
    nodes = [node(0, [WEIGHT], [X]), node(1, [X], [Y]), node(2, [Y], [LOSS])]
    outcome = replay_plan(STORAGES, nodes, steps("0 1 -2 1 2 -1 -2"), keep=KEEP)
    assert outcome.activation_bytes == 0
    assert outcome.recomputed_bytes == 0
    assert baseline_bytes(STORAGES) == outcome.baseline_bytes == 1000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0 1 2 -2 3 -1 -2 4 -4", r"row 4 .* node n3 reads y, not in memory"),
        ("0 1 2 -1 -1 3 -2 4 -4", r"row 4 .* free of x: it is not in memory"),
        ("-1 0 1 2 3 -1 -2 4 -4", r"row 0 .* free of x: it is not in memory"),
        ("0 1 1 2 3 -1 -2 4 -4", r"row 2 .* node n1 makes y, still in memory"),
        ("0 1 2 3 -1 -2 4 4 -4", r"row 7 .* node n4 may run only once"),
        ("0 1 2 3 -1 -2 4 -4 0 -1", r"row 8 .* node n0 runs again after something it reads was updated"),
        ("0 1 2 3 -1 -2 -4", r"1 nodes never run, such as n4"),
        ("", r"5 nodes never run, such as n0"),
        ("0 1 2 3 -2 4 -4", r"ends with the wrong storages in memory: \['x'\]"),
        ("0 1 2 3 -1 -2 4 -4 -3", r"ends with the wrong storages in memory: \['loss'\]"),
        ("0 1 2 3 -1 -2 4", r"ends with the wrong storages in memory: \['gradient'\]"),
        ("1 0 2 3 -1 -2 4 -4", r"row 0 .* node n1 reads x, not in memory"),
    ],
)
def test_illegal_plans(text: str, sentence: str) -> None:
    with pytest.raises(IllegalPlanError, match=sentence):
        play(text)


def test_persistent_storages_are_not_freed_without_a_copy() -> None:
    with pytest.raises(IllegalPlanError, match="free of weight: it has no copy in the lower tier"):
        play("-0 " + KEEP_ALL)


def test_budget() -> None:
    assert play(KEEP_ALL, budget=2501).peak_bytes == 2501
    with pytest.raises(IllegalPlanError, match=r"row 6 .* node n4 needs 2501 bytes, above the budget of 2500"):
        play(KEEP_ALL, budget=2500)


def test_an_update_after_the_last_reader_may_precede_other_work() -> None:
    """What was computed before an update may be read after it: only running again is wrong."""
    other = [*NODES, node(5, [X], [5], phase="backward"), node(6, [5], [], phase="backward")]
    storages = [*STORAGES, storage(5, 3)]
    text = "0 1 2 3 -2 4 -4 5 -1 6 -5"
    assert replay_plan(storages, other, steps(text), keep=KEEP).peak_bytes > 0
    again = "0 1 2 3 -2 4 -4 -1 0 5 -1 6 -5"
    with pytest.raises(IllegalPlanError, match="runs again after something it reads was updated"):
        replay_plan(storages, other, steps(again), keep=KEEP)


STATISTICS, A, B, OUT = range(4)


def batch_norm() -> tuple[list, list]:  # type: ignore[type-arg]
    """Statistics that a node changes when it runs first; running it again leaves them alone (`replay_arguments`)."""
    storages = [storage(STATISTICS, 8, "buffer"), storage(A, 4), storage(B, 4), storage(OUT, 1)]
    nodes = [
        node(0, [STATISTICS], [A], mutates=(STATISTICS,)),
        node(1, [A], [OUT]),
        node(2, [A], [B], phase="backward"),
    ]
    return storages, nodes


def test_replayable_changes_may_run_again() -> None:
    storages, nodes = batch_norm()
    outcome = replay_plan(storages, nodes, steps("0 1 -1 0 2 -1 -2"), keep=frozenset({OUT}))
    assert outcome.recomputed_bytes == 4


def test_a_reader_of_changed_statistics_may_not_run_again() -> None:
    storages, nodes = batch_norm()
    storages.append(storage(4, 2))
    nodes = [node(0, [STATISTICS], [4]), *(replace(n, node=n.node + 1) for n in nodes)]
    plain = "0 1 -4 2 3 -1 -2"
    replay_plan(storages, nodes, steps(plain), keep=frozenset({OUT}))
    with pytest.raises(IllegalPlanError, match="node n0 runs again after something it reads was updated"):
        replay_plan(storages, nodes, steps("0 1 -4 0 -4 2 3 -1 -2"), keep=frozenset({OUT}))


def dropout() -> tuple[list, list]:  # type: ignore[type-arg]
    storages = [storage(0, 100), storage(1, 200), storage(2, 1), storage(3, 5)]
    nodes = [
        node(0, [], [0], random=True),
        node(1, [], [1], random=True),
        node(2, [0, 1], [2]),
        node(3, [0, 1], [3], phase="backward"),
    ]
    return storages, nodes


def test_first_draws_keep_their_order() -> None:
    storages, nodes = dropout()
    keep = frozenset({2})
    replay_plan(storages, nodes, steps("0 1 2 3 -0 -1 -3"), keep=keep)
    with pytest.raises(IllegalPlanError, match="node n0 draws random numbers out of order"):
        replay_plan(storages, nodes, steps("1 0 2 3 -0 -1 -3"), keep=keep)
    # Running again may come in any order: the state is replayed.
    replay_plan(storages, nodes, steps("0 1 2 -0 -1 1 0 3 -0 -1 -3"), keep=keep)


def test_a_saved_random_state_is_counted_from_the_first_run_to_the_last() -> None:
    storages, nodes = dropout()
    outcome = replay_plan(storages, nodes, steps("0 1 2 -0 -1 0 1 3 -0 -1 -3"), keep=frozenset({2}))
    state = RANDOM_STATE_BYTES
    assert [r.resident_bytes for r in outcome.rows] == [
        100 + state,
        300 + 2 * state,
        301 + 2 * state,
        201 + 2 * state,
        1 + 2 * state,
        101 + state,
        301,
        306,
        206,
        6,
        1,
    ]
    # While a node runs again the generator's present state is kept beside the one it starts from.
    assert outcome.rows[5].peak_bytes == 101 + 3 * state
    assert outcome.rows[6].peak_bytes == 301 + 2 * state
    assert outcome.rows[1].peak_bytes == 300 + 2 * state


def test_a_saved_random_state_is_as_large_as_counted() -> None:
    import torch

    assert torch.get_rng_state().untyped_storage().nbytes() == RANDOM_STATE_BYTES


def test_a_sum_over_a_summand_by_hand() -> None:
    storages = [storage(0, 100, name="a"), storage(1, 100, name="b"), storage(2, 100, name="sum"), storage(3, 1)]
    nodes = [
        node(0, [], [0]),
        node(1, [], [1]),
        node(2, [0, 1], [2], takes=(0, 1), workspace_bytes=7),
        node(3, [2], [3]),
    ]
    keep = frozenset({3})

    def played(text: str) -> Outcome:
        return replay_plan(storages, nodes, steps(text), keep=keep)

    both = played("0 1 2 -0 -1 3 -2")
    assert [r.peak_bytes for r in both.rows] == [100, 200, 207, 200, 100, 101, 1]
    assert [r.resident_bytes for r in both.rows] == [100, 200, 200, 200, 100, 101, 1]
    assert both.peak_bytes == 207
    assert {o.name for o in both.occupants} == {"b", "sum", "workspace of n2"}
    assert played("0 1 2 -1 3 -0 -2").peak_bytes == 207, "the second, if only that is freed"
    late = played("0 1 2 3 -0 -1 -2")
    assert late.rows[2].peak_bytes == 307
    assert {o.name for o in late.occupants} == {"a", "b", "sum", "workspace of n2"}


def test_a_weight_is_not_updated_before_what_reads_it_as_it_was() -> None:
    """Nor does anything read it before an update that precedes it in the step."""
    late = storage(5, 5, name="late")
    reads = node(4, [X, WEIGHT], [5], phase="backward")
    update = replace(NODES[4], node=5)
    storages, nodes = [*STORAGES, late], [*NODES[:4], reads, update]
    assert replay_plan(storages, nodes, steps("0 1 2 3 -2 4 -1 -5 5 -4"), keep=KEEP).peak_bytes
    with pytest.raises(IllegalPlanError, match=r"row 6 .* node n4 uses weight after it was changed"):
        replay_plan(storages, nodes, steps("0 1 2 3 -2 5 4 -1 -5 -4"), keep=KEEP)
    again = [*NODES[:4], replace(update, node=4), replace(reads, node=5)]
    with pytest.raises(IllegalPlanError, match=r"row 5 .* node n4 uses weight before all is done to it that precedes"):
        replay_plan(storages, again, steps("0 1 2 3 -2 5 4 -1 -5 -4"), keep=KEEP)
