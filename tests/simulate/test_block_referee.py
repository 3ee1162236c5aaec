"""The referee of one block's schedule."""

from __future__ import annotations

import pytest

from stowage.stages.ir.block import Action, BlockGraph, BlockSchedule
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.simulate.block import BlockCost, replay_block
from tests.strategies import BlockBuilder


def actions(text: str) -> tuple[Action, ...]:
    """`0 1 -2`: compute nodes 0 and 1, free allocation 2."""
    return tuple(Action("free", int(w[1:])) if w.startswith("-") else Action("compute", int(w)) for w in text.split())


def two_layers(once: bool = False) -> BlockGraph:
    """f0 makes x (0), f1 makes y (1), which leaves; gradient (2) arrives; b1 makes (3) out of x, b0 makes (4)."""
    b = BlockBuilder()
    (x,) = b.add("f0", 1.0, [], 10, workspace=5, once=once)
    (y,) = b.add("f1", 2.0, [x], 20)
    (g,) = b.loss([y])
    (gx,) = b.add("b1", 4.0, [g, x], 10)
    (out,) = b.add("b0", 8.0, [gx], 7, workspace=50)
    return b.build([out])


def play(forward: str, backward: str, graph: BlockGraph | None = None, complete: bool = True) -> BlockCost:
    return replay_block(graph or two_layers(), BlockSchedule(actions(forward), actions(backward)), complete=complete)


def test_keep_all_by_hand() -> None:
    assert play("0 1", "-1 2 -2 -0 3 -3") == BlockCost(
        forward_time_s=3.0,
        backward_time_s=12.0,
        save_bytes=30,
        forward_peak_bytes=30,
        backward_peak_bytes=67,  # b0: 10 + 7 + 50; the start has 10 + 20 + 20
        recomputed_bytes=0,
    )


def test_recomputation_by_hand() -> None:
    cost = play("0 1 -0", "-1 0 2 -2 -0 3 -3")
    assert (cost.save_bytes, cost.recomputed_bytes, cost.backward_time_s) == (20, 10, 13.0)


def test_memory_at_the_start_of_backward_counts() -> None:
    """Output and its gradient are both there until somebody frees the output."""
    b = BlockBuilder()
    (y,) = b.add("f", 1.0, [], 100)
    (g,) = b.loss([y])
    (out,) = b.add("b", 1.0, [g], 1)
    cost = replay_block(b.build([out]), BlockSchedule(actions("0"), actions("-0 1 -1")))
    assert cost.backward_peak_bytes == 200


def test_fast_forward() -> None:
    cost = play("0 1 -0", "", complete=False)
    assert (cost.forward_time_s, cost.forward_peak_bytes, cost.save_bytes) == (3.0, 30, 20)


@pytest.mark.parametrize(
    ("forward", "backward", "sentence"),
    [
        ("1 0", "-1 2 -2 -0 3 -3", r"forward row 0: node 1 \(f1\) reads \[0\], not in memory"),
        ("0 1 -0 -0", "", r"forward row 3: frees allocation 0, which is not in memory"),
        ("0 0 1", "-1 2 -2 -0 3 -3", r"forward row 1: node 0 \(f0\) makes \[0\], still in memory"),
        ("0 1 2", "", r"forward row 2: node 2 \(b1\) reads \[2\], not in memory"),
        ("0 1 -1", "2 -2 -0 3 -3", r"forward ends without the block's output \[1\]"),
        ("0 1", "-1 -2 2 -0 3 -3", r"backward row 2: node 2 \(b1\) reads \[2\], not in memory"),
        ("0 1", "-1 2 -2 -0 -3", r"nodes \[3\] never run"),
        ("0 1", "-1 2 -2 -0 3", r"backward ends with \[3, 4\] in memory, not with \[4\]"),
        ("0 1", "-1 2 -2 -0 3 -3 -4", r"backward ends with \[\] in memory, not with \[4\]"),
    ],
)
def test_illegal_schedules(forward: str, backward: str, sentence: str) -> None:
    with pytest.raises(IllegalPlanError, match=sentence):
        play(forward, backward)


def test_once_is_once() -> None:
    graph = two_layers(once=True)
    play("0 1", "-1 2 -2 -0 3 -3", graph)
    with pytest.raises(IllegalPlanError, match=r"backward row 1: node 0 \(f0\) may run only once"):
        play("0 1 -0", "-1 0 2 -2 -0 3 -3", graph)


def test_backward_before_the_loss() -> None:
    """Even a backward node that reads nothing."""
    b = BlockBuilder()
    (y,) = b.add("f", 1.0, [], 1)
    b.loss([y])
    (out,) = b.add("b", 1.0, [], 1)
    graph = b.build([out])
    with pytest.raises(IllegalPlanError, match=r"forward row 1: backward node 1 \(b\) before the loss"):
        replay_block(graph, BlockSchedule(actions("0 1"), actions("-0 -1")))
