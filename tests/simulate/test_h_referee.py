"""The referee of H-Graphs: each rule has a schedule that breaks it, and memory is what one counts by hand."""

from __future__ import annotations

import dataclasses

import pytest

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.h_graph import HAction, HCluster, HGraph, HNode, HOption, HRun, HSchedule, HStep, HValue
from stowage.stages.simulate.h_graph import replay_h_graph

X, Y, GY, GX, G = range(5)


def graph() -> HGraph:
    """x = f0(); y = f1(x); both clusters have a keeping option and one that reads x and leaves nothing."""
    keep = HOption(
        "keep",
        10,
        HRun(1.0, (HStep(2, unborn=(X,)), HStep(10))),
        HRun(2.0, (HStep(11), HStep(3, released=(GX,), phantom_released_bytes=10))),
    )
    y_keep = HOption("keep", 10, HRun(1.0, (HStep(10),)), HRun(2.0, (HStep(10),)))
    y_again = HOption("again", 0, HRun(1.0, (HStep(5),)), HRun(3.0, (HStep(12),), (X,)))
    return HGraph(
        nodes=(
            HNode("f0", (), (X,), HRun(1.0)),
            HNode("f1", (X,), (Y,), HRun(1.0)),
            HNode("loss", (Y,), (GY,), HRun(0.0), once=True),
            HNode("b1", (GY,), (GX,)),
            HNode("b0", (GX,), (G,)),
        ),
        loss=2,
        values=tuple(HValue(name, size) for name, size in (("x", 4), ("y", 6), ("gy", 6), ("gx", 4), ("g", 1))),
        clusters=(HCluster(0, 4, (keep,)), HCluster(1, 3, (y_keep, y_again))),
        final=(G,),
    )


def rows(text: str) -> HSchedule:
    """`0.0` computes node 0 with option 0, `1` plainly; `-3` frees value 3, `~1` the phantom of cluster 1."""
    actions = []
    for word in text.split():
        if word[0] == "-":
            actions.append(HAction("free", int(word[1:])))
        elif word[0] == "~":
            actions.append(HAction("free_phantom", int(word[1:])))
        else:
            node, _, option = word.partition(".")
            actions.append(HAction("compute", int(node), int(option) if option else None))
    return HSchedule(tuple(actions))


def test_memory_and_time_are_counted_by_hand() -> None:
    cost = replay_h_graph(graph(), rows("0.0 1.0 -0 2 -1 3.0 -2 ~1 4.0 -3 ~0"))
    assert cost.time_s == 1 + 1 + 2 + 2
    # f1: x 4, y 6, phantom of f0 10, its own 10.
    assert cost.forward_peak_bytes == 30
    # The loss: y 6, gy 6, both phantoms.
    assert cost.save_bytes == 26
    assert cost.backward_peak_bytes == 32
    assert cost.peak_node == 2


def test_an_option_may_read_more_and_leave_less() -> None:
    cost = replay_h_graph(graph(), rows("0.0 1.1 2 -1 3.1 -0 -2 ~1 4.0 -3 ~0"))
    assert cost.save_bytes == 10 + 4 + 6
    # b1: phantom of f0 10, x 4, gy 6, gx 4, its own 12.
    assert cost.backward_peak_bytes == 36
    assert cost.time_s == 1 + 1 + 3 + 2


def test_fast_forward_leaves_nothing() -> None:
    cost = replay_h_graph(graph(), rows("0 1.0 -0 2 -1 3.0 -2 ~1 0.0 -0 4.0 -3 ~0"))
    assert cost.save_bytes == 16
    assert cost.time_s == 7


def test_what_goes_early_and_comes_late_counts_only_while_it_is_there() -> None:
    g = graph()
    # b0, last step: gx is gone and the phantom too; kept, both are there.
    early = replay_h_graph(g, rows("0.0 1.0 -0 2 -1 3.0 -2 ~1 4.0 -3 ~0 "))
    late = replay_h_graph(g, rows("0.0 1.0 -0 2 -1 3.0 -2 ~1 4.0 -4 4.0 -3 ~0"))
    assert early.backward_peak_bytes == late.backward_peak_bytes == 32
    last = dataclasses.replace(
        g,
        clusters=(
            HCluster(
                0,
                4,
                (
                    HOption(
                        "keep",
                        10,
                        HRun(1.0, (HStep(10),)),
                        HRun(2.0, (HStep(0), HStep(40, released=(GX,), phantom_released_bytes=10))),
                    ),
                ),
            ),
            g.clusters[1],
        ),
    )
    assert replay_h_graph(last, rows("0.0 1.0 -0 2 -1 3.0 -2 ~1 4.0 -3 ~0")).backward_peak_bytes == 41
    assert (
        replay_h_graph(last, rows("0.0 1.0 -0 2 -1 3.0 -2 ~1 4.0 -4 4.0 -3 ~0")).backward_peak_bytes == 40 + 10 + 4 + 1
    )
    # A value that is there already is there from the first step on.
    first = replay_h_graph(g, rows("0.0 1.0 -0 2 -1 3.0 -2 ~1 4.0 -3 ~0"))
    assert first.forward_peak_bytes == 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.0", "reads value 0"),
        ("0.0 -1", "frees value 1, which is not in memory"),
        ("0.0 ~1", "frees the phantom of cluster 1, which is not in memory"),
        ("0.3", "has no option 3"),
        ("0.0 1.0 2 3", "has no option None"),
        ("0.0 0", "adds to value 0"),
        ("0.0 -0 0.0", "makes the phantom of cluster 0, which is still in memory"),
        ("0.0 1.0 2 3.1", "needs the phantom of option 1"),
        ("0.0 1 2 3.0", "needs the phantom of option 0"),
        ("0.0 1.0 2 -2 2", "may run only once"),
        ("0.0 1.0 -0 2 -1 3.0 -2 ~1 4.0 -3", "phantoms \\[0\\] in memory"),
        ("0.0 1.0 -0 2 -1 3.0 -2 ~1 4.0 ~0", "ends with values \\[3, 4\\]"),
        ("0.0 1.0 -0 -1 ~0 ~1", "nodes \\[2, 3, 4\\] never run"),
    ],
)
def test_each_rule_has_a_schedule_that_breaks_it(text: str, message: str) -> None:
    with pytest.raises(IllegalPlanError, match=message):
        replay_h_graph(graph(), rows(text))


def test_values_are_complete_only_with_every_contribution() -> None:
    g = HGraph(
        nodes=(
            HNode("loss", (), (0,), HRun(0.0), once=True),
            HNode("b2", (), (1,), HRun(1.0)),
            HNode("b1", (0,), (1,), HRun(1.0)),
            HNode("b0", (1,), (2,), HRun(1.0)),
            HNode("early", (), (), HRun(1.0)),
        ),
        loss=0,
        values=(HValue("g", 1), HValue("sum", 2), HValue("out", 4)),
        clusters=(),
        final=(2,),
    )
    g.check()
    cost = replay_h_graph(g, rows("0 1 2 -0 3 -1 4"))
    assert (cost.time_s, cost.backward_peak_bytes) == (4.0, 6)
    with pytest.raises(IllegalPlanError, match="reads value 1"):
        replay_h_graph(g, rows("0 1 3"))
    with pytest.raises(IllegalPlanError, match="adds to value 1"):
        replay_h_graph(g, rows("0 1 1"))
    with pytest.raises(IllegalPlanError, match="before the loss"):
        replay_h_graph(g, rows("1 0"))


def test_a_graph_that_is_none_is_refused_in_a_sentence() -> None:
    g = graph()
    replace = dataclasses.replace
    node, keep = g.nodes[0], g.clusters[0].options[0]
    cases = [
        (replace(g, clusters=g.clusters[:1]), "node 3 \\(b1\\) has no way to run"),
        (replace(g, values=(*g.values, HValue("lonely", 1))), "values \\[5\\] have no contributor"),
        (replace(g, nodes=(replace(node, reads=(Y,)), *g.nodes[1:])), "node 0 reads value 1"),
        (replace(g, clusters=(replace(g.clusters[0], backward=1), g.clusters[1])), "has no way to run|does not have"),
        (replace(g, clusters=(*g.clusters, g.clusters[0])), "cluster 2 has no options, or a node of another"),
        (replace(g, nodes=(*g.nodes[:4], replace(g.nodes[4], plain=HRun(1.0)))), "can only run with an option"),
        (replace(g, nodes=(replace(node, plain=HRun(1.0, ())), *g.nodes[1:])), "without steps"),
        (
            replace(g, nodes=(replace(node, plain=HRun(1.0, (HStep(0, released=(Y,)),))), *g.nodes[1:])),
            "does not touch",
        ),
        (
            replace(g, nodes=(replace(node, plain=HRun(1.0, (HStep(0), HStep(0, unborn=(X,))))), *g.nodes[1:])),
            "not in order of time",
        ),
        (
            replace(g, nodes=(replace(node, plain=HRun(1.0, (HStep(0, (X,), (X,)),))), *g.nodes[1:])),
            "done with a value that it has not made",
        ),
    ]
    for case, message in cases:
        with pytest.raises(ValueError, match=message):
            case.check()
    assert keep.phantom_bytes == 10


def test_names_are_not_in_the_hash_and_everything_else_is() -> None:
    g = graph()
    renamed = dataclasses.replace(g, values=(HValue("other", 4), *g.values[1:]))
    larger = dataclasses.replace(g, values=(HValue("x", 5), *g.values[1:]))
    assert g.content_hash() == renamed.content_hash() != larger.content_hash()
