"""`quick` solves blocks only where rules for the whole step leave much to be desired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import stowage.flows.planning.step as planning_step
from stowage.flows.planning.effort import QUICK
from stowage.flows.planning.step import Costed, Planning, StepToPlan, cost_step, solve_costed
from stowage.stages.ir.activations import device_budget, fixed_bytes
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.plan import Option
from stowage.stages.solve import Known, Variant
from stowage.stages.solve.summary import Solved
from stowage.stages.workload.samples import sample_batch
from tests.configurations.alongside import small_gpt2

ALWAYS = replace(QUICK, rules_suffice=0.0)
"""`quick` that solves blocks for every plan."""

FIXED = {"keep_all", "recompute_all", "chen"}


@cache
def costed(stores: Path) -> Costed:
    model = small_gpt2(n_layer=4, n_embd=32, n_positions=32)
    optimizer = torch.optim.AdamW(model.parameters())
    step = StepToPlan(model=model, batch=sample_batch(model, 4, 32, 0), optimizer=optimizer)
    return cost_step(step, Planning(stores=stores, effort=QUICK, costs="roofline"))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


def planned(stores: Path, share: float, how: Planning) -> tuple[Solved, list[str], set[str]]:
    """Return a plan, the stages that it took, and the finders of the schedules that it was chosen from."""
    stages: list[str] = []
    step = costed(stores)
    budget = device_budget(fixed_bytes(step.variants[0].trace), step.eager_peak_bytes, share)
    how = replace(how, stores=stores, progress=stages.append)
    solved, options = solve_costed(step, budget, how, known=Known())
    assert solved.summary.device_peak_bytes <= budget
    return solved, stages, {o.formulation for o in options}


def test_no_block_is_solved_where_rules_come_near_the_bound(stores: Path) -> None:
    solved, stages, finders = planned(stores, 0.6, Planning(stores=stores, effort=QUICK))
    assert solved.summary.recomputed_bytes > 0
    assert solved.summary.step_time_s <= QUICK.rules_suffice * solved.summary.lower_bound_s
    assert "options" not in stages
    assert finders <= FIXED


def test_blocks_are_solved_where_rules_do_not(stores: Path) -> None:
    by_rules, _, _ = planned(stores, 0.22, Planning(stores=stores, effort=replace(QUICK, rules_suffice=100.0)))
    assert by_rules.summary.step_time_s > QUICK.rules_suffice * by_rules.summary.lower_bound_s
    solved, stages, _ = planned(stores, 0.22, Planning(stores=stores, effort=QUICK))
    searched, _, _ = planned(stores, 0.22, Planning(stores=stores, effort=ALWAYS))
    assert "options" in stages
    assert solved.summary.step_time_s <= min(s.summary.step_time_s for s in (by_rules, searched)) + 1e-12


def test_what_rules_alone_find_is_not_lost(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules of blocks may need more than the budget: they are searched within time limits."""
    patient = replace(QUICK, rules_suffice=1.0, slots=QUICK.slots - 1)  # of no stored plan
    found, _, _ = planned(stores, 0.5, Planning(stores=stores, effort=replace(QUICK, slots=99)))

    search = planning_step.solve_variants

    def only_fixed(variants: Sequence[Variant], options: Sequence[Option], *more: Any) -> Solved:
        if {o.formulation for o in options} <= FIXED:
            return search(variants, options, *more)
        raise Infeasible(1, 10**9, "nothing")

    monkeypatch.setattr(planning_step, "solve_variants", only_fixed)
    kept, _, _ = planned(stores, 0.5, Planning(stores=stores, effort=patient))
    assert kept.summary.step_time_s == pytest.approx(found.summary.step_time_s)
    with pytest.raises(Infeasible):
        solve_costed(costed(stores), 1, Planning(stores=stores, effort=patient))


def test_few_blocks_are_solved_at_once_where_something_may_be_offloaded() -> None:
    """Otherwise most of planning, which decides what is offloaded, happens twice: it did for a sharded GPT-2."""
    assert QUICK.rules_first(3, offloads=False)
    assert not QUICK.rules_first(3, offloads=True)
    assert QUICK.rules_first(43, offloads=True)
    assert not ALWAYS.rules_first(43, offloads=True)


@pytest.mark.parametrize("method", ["rockmate", "rotor"])
def test_a_method_that_is_named_gets_its_schedules(stores: Path, method: str) -> None:
    how = Planning(stores=stores, effort=QUICK, method=method)
    _, stages, _ = planned(stores, 0.6, how)
    assert "options" in stages
