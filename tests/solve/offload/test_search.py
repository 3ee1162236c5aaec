"""When O-ILP is asked again: with less, of its relaxation, and not for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stowage.stages.formulations.offload.bounds import lower_bound
from stowage.stages.formulations.offload.o_ilp.answers import OIlpAnswer
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
from stowage.stages.ir.machine import Link
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.offmate import search
from stowage.stages.solve.offload.offmate.choices import choices_of
from stowage.stages.solve.offload.offmate.problem import ChainProblem
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.proposal import JudgedPlan, Task
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solver.outcome import SolverSettings
from tests.offload.with_lower_tier import LOWER_TIER, smallest_with_lower_tier
from tests.runtime.beside_eager import adamw, prepare
from tests.solve.judged import judged
from tests.zoo import ZOO

SETTINGS = SolverSettings(time_limit_s=10.0, gap=0.01)


def plans_of(offloader: Offloader, budget_bytes: int) -> list[JudgedPlan]:
    """All that a search proposes and the referee accepts."""
    task = Task(offloader.program, offloader.chain, PlanRequest(budget_bytes, o_ilp_limits=SETTINGS))
    return judged(offloader.program, search.OffMate(offloader).propose(task), budget_bytes)


@pytest.fixture(scope="module")
def small() -> tuple[Offloader, int]:
    """A small GPT-2, and a budget that is enough for O-ILP."""
    prepared = prepare(ZOO["gpt2"], adamw)
    program = program_of(prepared.trace, prepared.nodes)
    offloader = Offloader(program, Chain(prepared.blocks, prepared.nodes, prepared.options), LOWER_TIER)
    return offloader, smallest_with_lower_tier(prepared) * 4


def test_with_a_plan_at_hand_slow_solves_end_the_search(
    small: tuple[Offloader, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader, budget_bytes = small
    monkeypatch.setattr(search, "CLOSE_TO_O_ILP", 0.0)  # no plan is good enough to stop for
    asked: dict[float, int] = {}
    for wall_s in (0.0, search.SOLVES_PER_LIMIT * SETTINGS.time_limit_s + 1):

        def took(*arguments: Any, wall_s: float = wall_s, **more: Any) -> OIlpAnswer:
            asked[wall_s] = asked.get(wall_s, 0) + 1
            return replace(o_ilp(*arguments, **more), wall_s=wall_s)

        monkeypatch.setattr(search, "o_ilp", took)
        plans = plans_of(offloader, budget_bytes)
        assert any(p.outcome.peak_bytes <= budget_bytes for p in plans)
    quick, slow = asked.values()
    assert slow == 1 < quick


def test_what_rates_allow_is_stated_of_all_means_whichever_search_finds_the_plan(
    small: tuple[Offloader, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search without updates on the CPU has a larger bound, which the CPU could beat: no plan states it."""
    offloader, _ = small
    # A link as slow as this is what the states wait for; the CPU could update what is in the host.
    tier = replace(LOWER_TIER, link=Link(2e6, 2e6), cpu_update_bytes_per_s=1e12)
    slow = Offloader(offloader.program, offloader.chain, tier)
    without = Offloader(offloader.program, offloader.chain, replace(tier, cpu_update_bytes_per_s=0.0))
    budget_bytes = int(offloader.program.base_bytes * 0.8)

    def bound_s(one: Offloader) -> float:
        problem = ChainProblem(one, choices_of(one, preprint=False))
        return lower_bound(problem.within(budget_bytes)).total_s

    assert bound_s(slow) < bound_s(without)
    monkeypatch.setattr(search, "CLOSE_TO_O_ILP", 0.0)  # so that all searches are made
    task = Task(slow.program, slow.chain, PlanRequest(budget_bytes, o_ilp_limits=SETTINGS))
    stated = set[float]()
    proposals = search.OffMate(slow).propose(task)
    for proposal in proposals:
        stated.add(proposal.rates_bound_s)
    assert stated == {bound_s(slow)}
