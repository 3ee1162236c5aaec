"""The bound of steps that freeze is never above the fastest of all plans that fit under every mask."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from stowage.stages.freezing.guards import guards_of
from stowage.stages.freezing.projection import Guarded
from stowage.stages.freezing.times import mean_times
from stowage.stages.simulate.lower_tier import NO_TIER
from stowage.stages.solve.cuts.frozen_bound import FrozenStep
from stowage.stages.solve.cuts.naming import NamedWay
from stowage.stages.solve.cuts.union import Union
from stowage.stages.solve.frozen import worst_peak
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.of_trace import program_of
from tests.freezing.every_frozen_plan import FastestFrozen, fastest_frozen
from tests.freezing.tiny_frozen_steps import TinyFrozen, tiny_frozen_steps
from tests.matrix import examples

SAME = 1 + 1e-9

PLENTY = 1 << 40

MUCH = 1.6
"""Times what the fastest plan of all takes up to which plans are looked for: nothing is said of what needs more."""


def peak_bytes(step: TinyFrozen, plan: FastestFrozen) -> int:
    """The memory of a plan under its worst mask, by the referee, who must find its mean time too."""
    way, freezable = step.way, step.freezable
    rows = program_of(way.trace, way.nodes).steps([Execution(n, f"{k}") for k, n in enumerate(plan.order)])
    guards = guards_of(way.trace, way.nodes, rows, freezable.units)
    guarded = Guarded(way.trace, way.nodes, rows, freezable.units, guards)
    assert mean_times(guarded, freezable.active)[0] == pytest.approx(plan.mean_s)
    return worst_peak(guarded, freezable.active, NO_TIER)[1]


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(tiny_frozen_steps(), st.data())
def test_of_all_plans(step: TinyFrozen, data: st.DataObject) -> None:
    """With cuts at all of backward and anywhere else, in budgets below what the fastest plan of all takes."""
    free = fastest_frozen(step.way, step.freezable, PLENTY)
    assert free is not None
    peak, less = peak_bytes(step, free), data.draw(st.integers(1, 12))
    fastest: FastestFrozen | None = None
    while fastest is None and less:
        budget = peak - less
        fastest = fastest_frozen(step.way, step.freezable, budget, MUCH * free.mean_s)
        less //= 2
    if fastest is None:
        event("no plan takes less memory")
        return
    assert peak_bytes(step, fastest) <= budget
    named = NamedWay(step.way)
    union = Union.of([named])
    assert union is not None
    places = {n.node for n in step.way.nodes if n.phase == "backward"}
    places |= data.draw(st.sets(st.sampled_from(range(len(step.way.nodes))), max_size=2))
    numbers = union.numbers_of(named)
    bound = FrozenStep([named], union, step.freezable, budget).improve(
        [numbers[n] for n in sorted(places)], time.monotonic() + 20
    )
    assert bound.bound_s <= fastest.mean_s * SAME
    event("every operation once" if fastest.mean_s <= free.mean_s * SAME else "something runs again")
    event("a cut says more" if bound.cuts else "once")
