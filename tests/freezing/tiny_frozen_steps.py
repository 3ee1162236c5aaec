"""Tiny steps whose weights may be frozen: a chain forward, and backward what reads what it made, in units."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.trace import Gradient
from stowage.stages.ir.units import Unit
from stowage.stages.partition import make_blocks
from stowage.stages.solve import Variant
from tests.solve.synthetic_steps import StepBuilder

TIME_S = 1e-3


@dataclass(frozen=True)
class TinyFrozen:
    """A step, and what of it may be frozen."""

    way: Variant
    freezable: Freezable


@st.composite
def tiny_frozen_steps(draw: st.DrawFn) -> TinyFrozen:
    """Two layers or three, whose weights are in a unit each or always train, and are updated unless gradients stay."""
    b = StepBuilder()
    layers = 3 if draw(st.integers(0, 7)) == 7 else 2
    size = st.integers(2, 9)
    weights = [b.persistent(f"w{k}", draw(st.integers(1, 3))) for k in range(layers)]
    given = b.persistent("input", 1, "input")
    updates = layers == 2 and draw(st.booleans())
    made, extra = [given], list[list[int]]()
    for k in range(layers):
        sizes = [draw(size), *(draw(size) for _ in range(draw(st.integers(0, 1))))]
        first, *more = b.call(f"f{k}", [made[-1], weights[k]], *sizes)
        made.append(first)
        extra.append(more)
    (b.loss_value,) = b.call("loss", [made[-1]], 1)
    (gradient,) = b.call("loss_grad", [b.loss_value], draw(st.integers(1, 3)), phase="backward")
    for k in reversed(range(layers)):
        needs = [gradient, *extra[k], *([made[k + 1]] if draw(st.booleans()) else [])]
        nbytes = b.storages[b.values[weights[k]].storage].nbytes
        (own,) = b.call(f"w{k}_grad", [*needs, made[k]], nbytes, phase="backward")
        b.gradients.append(Gradient(b.values[weights[k]].name, weights[k], own))
        if updates:
            b.update(f"w{k}", weights[k], own, 1)
        if k:
            (gradient,) = b.call(f"x{k}_grad", [*needs, weights[k]], draw(st.integers(1, 3)), phase="backward")
    trace = b.build()
    names = sorted({call.signature for call in trace.calls})
    costs = {s: Cost(s, "made up", draw(st.integers(1, 5)) * TIME_S, 0, 0, 1, "measured") for s in names}
    nodes, blocks = make_blocks(trace, costs)
    freeze = [k for k in range(layers) if draw(st.integers(0, 5)) < 5] or [0]
    units = tuple(Unit(f"w{k}", (f"w{k}",)) for k in freeze)
    return TinyFrozen(Variant("plain", trace, nodes, blocks), Freezable(units, draw(st.integers(1, len(units)))))
