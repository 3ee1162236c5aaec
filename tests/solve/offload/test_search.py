"""When O-ILP is asked again: with less, of its relaxation, and not for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stowage.stages.formulations.offload.o_ilp.answers import OIlpAnswer
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.offmate import search
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
