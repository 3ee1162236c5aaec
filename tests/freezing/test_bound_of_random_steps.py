"""No plan of a random step that freezes has a lower mean time than the bound of all that fit under its masks."""

from __future__ import annotations

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from stowage.stages.freezing.units import units_of
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.methods import METHODS
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import Unit
from stowage.stages.solve import Variant
from stowage.stages.solve.frozen import freezing_plan, most_bytes
from stowage.stages.solve.summary import Solved
from tests.freezing.test_no_frozen_plan_beats_the_bound import SAME, bounded
from tests.matrix import examples
from tests.solve.prepared import Prepared, prepare_trace
from tests.solve.synthetic_steps import training_steps

ALONE = [m.name for m in METHODS if not m.offloads and not m.whole]


@st.composite
def freezables(draw: st.DrawFn, trace: TraceTables) -> Freezable | None:
    """Units of one or several parameters each, some of which may be in none; None where nothing is trained."""
    names = [name for unit in units_of(trace, "saving") for name in unit.parameters]
    groups: dict[int, list[str]] = {}
    for name in names:
        group = draw(st.integers(-1, 3))
        if group >= 0:
            groups.setdefault(group, []).append(name)
    if not groups:
        return None
    units = tuple(Unit(group[0], tuple(group)) for group in groups.values())
    return Freezable(units, draw(st.integers(1, len(units))))


def frozen_plans(prepared: Prepared, freezable: Freezable) -> list[Solved]:
    """The plan of every method within several budgets, with what it takes under masks."""
    whole = prepared.solve().summary
    least, most = whole.smallest_feasible_bytes, whole.device_peak_bytes
    found = []
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = least + int(share * (most - least))
        for method in ALONE:
            try:
                plan = prepared.solve(budget, method)
            except (Infeasible, ParameterError):
                continue
            found.append(freezing_plan(prepared.trace, prepared.nodes, plan, freezable, budget))
    return found


@settings(max_examples=examples(75), deadline=None, suppress_health_check=list(HealthCheck))
@given(training_steps(max_layers=5), st.data())
def test_of_random_steps_and_units(trace: TraceTables, data: st.DataObject) -> None:
    freezable = data.draw(freezables(trace))
    if freezable is None:
        return
    prepared = prepare_trace(trace)
    way = Variant("plain", trace, prepared.nodes, prepared.blocks)
    plans = frozen_plans(prepared, freezable)
    budgets = sorted({most_bytes(p) for p in plans})
    for budget in {budgets[0], budgets[len(budgets) // 2]}:
        fitting = [p for p in plans if most_bytes(p) <= budget]
        best = min(fitting, key=lambda p: p.summary.step_time_s)
        found = bounded(best, way, [way], freezable, budget).summary
        assert all(p.summary.step_time_s * SAME >= found.bound_s for p in fitting)
        event(found.bound_kind)
