"""A fixed set of tiny steps with budgets and cuts, each with the fastest of all its schedules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from stowage.stages.formulations.cuts.solve import solve_cuts
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.solver.outcome import SolverSettings
from tests.formulations.cuts.every_schedule import Fastest, fastest_schedule
from tests.formulations.cuts.tiny_budgets import binds, steps_within
from tests.formulations.cuts.tiny_steps import chains_of_cuts

COUNT = 150


@dataclass(frozen=True)
class Drawn:
    """A step within a budget, cut somewhere."""

    step: StepGraph
    cuts: tuple[int, ...]
    budget: int
    fastest: Fastest | None

    @property
    def binds(self) -> bool:
        """Whether the fastest schedule runs something again."""
        return self.fastest is not None and binds(self.step, self.fastest.time_s)

    def bound_s(self, step: StepGraph) -> float:
        """The bound of a step in the place of this one."""
        return solve_cuts(step, self.cuts, self.budget, SolverSettings(20.0)).bound_s


@cache
def drawn_steps() -> tuple[Drawn, ...]:
    """The same steps in every run, drawn as tests draw them."""
    found: list[Drawn] = []

    @seed(1)
    @settings(
        max_examples=COUNT,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )
    @given(steps_within().flatmap(lambda s: st.tuples(st.just(s), chains_of_cuts(s[0]))))
    def collect(drawn: tuple[tuple[StepGraph, int], tuple[int, ...]]) -> None:
        (step, budget), cuts = drawn
        found.append(Drawn(step, cuts, budget, fastest_schedule(step, budget)))

    collect()
    return tuple(found)
