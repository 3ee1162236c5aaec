"""A summary tells of what decided its plan: O-ILP of one that offloads, the options' solver of one made of options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stowage.stages.formulations.offload.o_ilp.answers import OIlpAnswer
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.settings import load_settings
from stowage.stages.solve import LowerTier, PlanRequest, Solved, solve_plan
from stowage.stages.solve.offload import sources
from stowage.stages.solve.offload.offmate import search
from stowage.stages.solve.parameters import o_ilp_limits
from stowage.stages.solver.outcome import SolverSettings
from stowage.stages.trace import MicroBatch
from tests.offload.with_lower_tier import LOWER_TIER
from tests.runtime.beside_eager import adamw, prepare
from tests.solve.prepared import PLENTY, Prepared, prepared_zoo
from tests.zoo import ZOO

OPTIONS = SolverSettings(time_limit_s=9.0, seed=5)
O_ILP = SolverSettings(time_limit_s=7.0, gap=0.05, seed=3)


def solve(prepared: Prepared, budget: int, method: str, lower_tier: LowerTier | None = None) -> Solved:
    request = PlanRequest(
        budget, method=method, slots=100, lower_tier=lower_tier, options_limits=OPTIONS, o_ilp_limits=O_ILP
    )
    return solve_plan(prepared.trace, prepared.nodes, prepared.blocks, prepared.options, request)


def told(summary: PlanSummary) -> tuple[str, str, float, int]:
    return summary.solver, summary.status, summary.time_limit_s, summary.seed


def test_of_a_plan_that_offloads_o_ilp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, limits and proof; and those are the limits that it got."""
    answers: list[tuple[SolverSettings, OIlpAnswer]] = []

    def asked(problem: Any, settings: SolverSettings, **more: Any) -> OIlpAnswer:
        answers.append((settings, o_ilp(problem, settings, **more)))
        return answers[-1][1]

    monkeypatch.setattr(search, "o_ilp", asked)
    monkeypatch.setattr(sources.RuleSource, "propose", lambda self, task: iter(()))
    prepared = prepared_zoo("resnet")
    summary = solve(prepared, prepared.solve().summary.smallest_feasible_bytes, "offmate", LOWER_TIER).summary
    assert summary.method == "offmate"
    assert summary.lower_tier_bytes > 0
    assert {settings for settings, _ in answers} == {O_ILP}
    solver, status, limit_s, seed = told(summary)
    assert solver in {f"o_ilp, {answer.solver}" for _, answer in answers}
    assert (limit_s, seed) == (7.0, 3)
    reaches_the_bound = summary.step_time_s <= summary.lower_bound_s * (1 + 1e-9)
    if not reaches_the_bound:
        assert (status, summary.gap) in {(answer.status, answer.gap) for _, answer in answers}
    assert summary.gap <= O_ILP.gap


def found_by(prepared: Prepared, **how: Any) -> Prepared:
    """The same options, but who found those that compute again."""
    options = [o if o.formulation == "keep_all" else replace(o, **how) for o in prepared.options]
    return replace(prepared, options=options)


@pytest.mark.parametrize(("status", "gap"), [("optimal", 0.0), ("feasible", 0.03)])
def test_of_a_plan_made_of_options_whoever_found_them(status: str, gap: float) -> None:
    prepared = found_by(prepared_zoo("resnet"), formulation="retention", status=status, gap=gap)
    summary = solve(prepared, prepared.solve().summary.smallest_feasible_bytes, "rockmate").summary
    assert summary.step_time_s > summary.lower_bound_s
    assert told(summary) == ("rk_rotor, retention", status, 9.0, 5)
    assert summary.gap == gap


def test_options_of_a_rule_have_no_proof_and_no_limit() -> None:
    prepared = found_by(prepared_zoo("resnet"), formulation="selective", status="heuristic", gap=0.0)
    summary = solve(prepared, prepared.solve().summary.smallest_feasible_bytes, "rockmate").summary
    assert told(summary) == ("rk_rotor, selective", "heuristic", 0.0, 0)
    assert summary.gap == pytest.approx(1 - summary.lower_bound_s / summary.step_time_s)


def test_options_that_are_not_in_the_plan_say_nothing() -> None:
    prepared = found_by(prepared_zoo("resnet"), formulation="retention", status="feasible", gap=0.5)
    summary = solve(prepared, PLENTY, "auto").summary
    assert told(summary) == ("keep_all", "optimal", 0.0, 0)
    assert summary.gap == 0


def test_of_a_fixed_policy_its_name_and_the_distance_to_the_lower_bound() -> None:
    summary = solve(prepared_zoo("resnet"), PLENTY, "recompute_all").summary
    assert told(summary) == ("recompute_all", "heuristic", 0.0, 0)
    assert summary.gap == pytest.approx(1 - summary.lower_bound_s / summary.step_time_s)
    assert summary.gap > 0


def test_of_a_sweep_that_no_solver_decided() -> None:
    prepared = prepare(ZOO["tied"], adamw, MicroBatch(max_grad_norm=1.0))
    summary = solve(prepared, prepared.solve().summary.smallest_feasible_bytes - 1, "offmate", LOWER_TIER).summary
    assert summary.method == "belady"
    assert told(summary) == ("belady", "heuristic", 0.0, 0)
    assert summary.gap == pytest.approx(1 - summary.lower_bound_s / summary.step_time_s)


def test_params_yaml_reaches_o_ilp() -> None:
    settings = load_settings()
    solve_settings = settings.solve.model_copy(update={"time_limit_s": 3.0, "gap": 0.2})
    options = settings.options.model_copy(update={"seed": 11})
    changed = settings.model_copy(update={"solve": solve_settings, "options": options})
    assert o_ilp_limits(settings) == SolverSettings(20.0, 0.01, settings.options.seed)
    assert o_ilp_limits(changed) == SolverSettings(3.0, 0.2, 11)
