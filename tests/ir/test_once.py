"""Which nodes the trace alone says run once: those that change something for good, and who reads it before they do."""

from __future__ import annotations

from dataclasses import replace

from stowage.stages.ir.once import once_by_trace
from stowage.stages.ir.operators import SPENDS
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition import make_blocks
from tests.solve.synthetic_steps import StepBuilder, costs_for


def named_once(trace: TraceTables, *, all_once: bool = False) -> set[str]:
    """The first calls of the nodes that run once by the trace; the partition may have all of them run once."""
    nodes, _ = make_blocks(trace, costs_for(trace))
    if all_once:
        nodes = [replace(n, once=True) for n in nodes]
    return {trace.calls[nodes[n].calls[0]].module for n in once_by_trace(trace, nodes)}


def step(*, replay: bool = False, target: str = "aten.op.default") -> TraceTables:
    """Reads statistics, changes them, reads them again; a weight is read by forward, and updated."""
    b = StepBuilder()
    weight, given = b.persistent("w", 4), b.persistent("input", 3, "input")
    statistics = b.persistent("statistics", 2, "buffer")
    (early,) = b.call("early", [given, statistics], 4)
    (other,) = b.call("other", [early, weight], 4, target=target)
    (changed,) = b.call("changes", [other, statistics], 4, mutates=[statistics], replay=replay)
    (late,) = b.call("late", [changed, statistics], 4)
    (b.loss_value,) = b.call("loss", [late], 1)
    (g,) = b.call("g", [b.loss_value, late], 4, phase="backward")
    b.update("w", weight, g, 8)
    return b.build()


def test_what_changes_for_good_and_what_reads_it_before() -> None:
    """What reads it afterwards finds the same again; weights are for plans to see to."""
    assert named_once(step(), all_once=True) == {"early", "changes", "update w"}


def test_what_can_be_made_again_without_changing_anything() -> None:
    """Its first run has changed what was read before."""
    assert named_once(step(replay=True), all_once=True) == {"early", "update w"}


def test_what_plans_alone_keep_is_not_among_them() -> None:
    """Where everything is once, as with what the partition has plans keep, only the trace's reasons count."""
    trace = step()
    assert named_once(trace) <= named_once(trace, all_once=True)
    assert named_once(trace, all_once=True).isdisjoint({"other", "late", "loss", "g"})


def test_what_uses_something_up() -> None:
    assert "other" in named_once(step(target=next(iter(SPENDS))), all_once=True)
