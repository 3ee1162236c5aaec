"""The bound of the cut formulation against exhaustive search."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.cuts.domain import Domain
from stowage.stages.formulations.cuts.schedule import order_of
from stowage.stages.formulations.cuts.solve import ROUNDING, solve_cuts
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cuts.every_schedule import fastest
from tests.formulations.cuts.tiny_budgets import binds, steps_within
from tests.formulations.cuts.tiny_steps import chains_of_cuts, kinds_of, peak_bytes, tiny_steps
from tests.formulations.cuts.tiny_ways import tiny_ways


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_bound_is_never_above_the_fastest_of_all_schedules(data: st.DataObject) -> None:
    """Neither the bound of the integer program nor that of its relaxation, for any cuts and any budget."""
    step, budget = data.draw(steps_within())
    cuts = data.draw(chains_of_cuts(step))
    optimum = fastest(step, budget)
    once_s = max(sum(n.time_s for n in step.nodes if n.collective is lane) for lane in (False, True))
    certain = [n for n, (first, last) in enumerate(Domain.of(step, cuts).first) if first == last and n not in cuts]
    heavy = data.draw(st.sets(st.sampled_from(certain))) if certain else set[int]()
    for integral in (True, False):
        found = solve_cuts(step, cuts, budget, SolverSettings(20.0), heavy=heavy, integral=integral)
        assert found.bound_s <= optimum * (1 + 1e-12)  # the same times may be added up in another order
        assert found.bound_s >= once_s * (1 - ROUNDING)
        if found.status == "infeasible":
            event("proven infeasible")
    event("tight" if found.bound_s >= optimum * (1 - 1e-5) else "loose")
    event("something runs again" if binds(step, optimum) else "no schedule" if math.isinf(optimum) else "nothing again")
    for kind in kinds_of(step):
        event(kind)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_lasts_is_changed_only_after_what_uses_it_as_it_was(data: st.DataObject) -> None:
    """In whatever intervals the program puts first runs: a weight that is updated too early gives other numbers."""
    step = data.draw(tiny_steps())
    cuts = data.draw(chains_of_cuts(step))
    found = solve_cuts(step, cuts, peak_bytes(step) - data.draw(st.integers(0, 8)), SolverSettings(20.0))
    if not found.runs:
        event("no schedule")
        return
    first: dict[int, int] = {}
    for position, (node, _) in enumerate(order_of(step, found)):
        first.setdefault(node, position)
    for node, earlier in step.after.items():
        assert all(first[before] < first[node] for before in earlier)
    event("an order" if step.after else "nothing is changed")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_bound_of_all_ways_is_never_above_the_fastest_schedule_of_any_choice(data: st.DataObject) -> None:
    """Each site is computed as it was or in another way, and the bound holds for every choice."""
    ways = data.draw(tiny_ways())
    union = ways.union
    chain = [n for n in data.draw(chains_of_cuts(union)) if n not in union.optional]
    cuts: list[int] = []
    for node in chain:
        if not cuts or union.precedes(cuts[-1], node):
            cuts.append(node)
    each = list(ways.each())
    budget = max(peak_bytes(step) for step in each) - data.draw(st.integers(0, 10))
    found_s = [fastest(step, budget) for step in each]
    least_s = min(step.once_s for step in each)
    assert union.once_s <= least_s * (1 + 1e-12)
    for integral in (True, False):
        found = solve_cuts(union, cuts, budget, SolverSettings(20.0), integral=integral)
        assert found.bound_s <= min(found_s) * (1 + 1e-12)
    tight = found.bound_s >= min(found_s) * (1 - 1e-5) and min(found_s) > union.once_s * 1.01
    event("tight" if tight else "loose or nothing again")
    event("another way is faster" if min(found_s) < found_s[0] else "as it was is fastest")
    event("not all is allowed" if len(each) < 1 << len(ways.sites) else "all is allowed")
