"""Methods `h_ilp` and `h_retention` solve clusters with the model of that name, and neither with the other one."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.formulations.block.retention import solve_executions
from stowage.stages.formulations.cluster.h_ilp import solve as h_ilp
from stowage.stages.formulations.cluster.retention import solve as h_retention
from stowage.stages.ir.block import Action, BlockGraph
from stowage.stages.ir.encoding import schedule_of
from stowage.stages.ir.plan import Option
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.tasks import GridSize
from stowage.stages.partition.clusters.partition import Limits
from stowage.stages.simulate.block import replay_block
from stowage.stages.solver.outcome import SolverSettings
from tests.options.clusters.made_clusters import clusters_of
from tests.strategies import deep_chain

PATIENT = SolverSettings(time_limit_s=60.0)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many models of each were made; everything is solved in this process."""
    found: Counter[str] = Counter()
    build, of = h_ilp.build, h_retention.HRetentionModel.of

    def h_ilp_built(*arguments: Any, **more: Any) -> Any:
        found["h_ilp"] += 1
        return build(*arguments, **more)

    def h_retention_built(*arguments: Any, **more: Any) -> Any:
        found["h_retention"] += 1
        return of(*arguments, **more)

    monkeypatch.setattr(h_ilp, "build", h_ilp_built)
    monkeypatch.setattr(h_retention.HRetentionModel, "of", staticmethod(h_retention_built))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    return found


def by_clusters(graph: BlockGraph, formulation: str) -> list[Option]:
    size = GridSize(
        2,
        2,
        max_exact_nodes=12,
        greedy_levels=2,
        cluster_peaks=2,
        cluster_saves=1,
        top_peaks=3,
        top_saves=1,
        cluster_formulation=formulation,
    )
    rows = clusters_of(graph, Limits(top_size=6, size=4))
    return options_for_blocks([graph], None, size=size, settings=PATIENT, clusters=rows)[graph.content_hash()]


def test_h_ilps_plans_are_its_own_legal_and_within_proven_bounds(built: Counter[str]) -> None:
    graph = deep_chain(2)
    options = by_clusters(graph, "h_ilp")
    assert built["h_ilp"] > 1
    assert not built["h_retention"]
    mine = [o for o in options if o.formulation == "h_ilp"]
    assert mine, "no option is H-ILP's"
    assert not any(o.formulation == "h_retention" for o in options)
    for option in mine:
        cost = replay_block(graph, schedule_of(option))
        peak = max(cost.forward_peak_bytes, cost.backward_peak_bytes)
        assert peak == max(option.forward_peak_bytes, option.backward_peak_bytes)
        runs = Counter(a.index for part in _parts(option) for a in part if a.kind == "compute")
        _, report = solve_executions(graph, peak, cost.save_bytes, PATIENT, computations=max(runs.values()))
        assert report is not None, "a schedule is there"
        assert report.status == "optimal"
        assert cost.forward_time_s + cost.backward_time_s >= report.bound_s * (1 - 1e-9)


def test_retention_is_asked_under_its_own_name(built: Counter[str]) -> None:
    options = by_clusters(deep_chain(2), "h_retention")
    assert built["h_retention"] > 1
    assert not built["h_ilp"]
    assert not any(o.formulation == "h_ilp" for o in options)


@pytest.mark.parametrize(("method", "other"), [("h_ilp", "h_retention"), ("h_retention", "h_ilp")])
def test_fit_asks_the_formulation_that_its_method_names(
    method: str, other: str, built: Counter[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(16, 16), nn.Tanh())))
    batch = torch.linspace(-1, 1, 512 * 16).reshape(512, 16)

    def loss(outputs: torch.Tensor, given: object) -> torch.Tensor:
        del given
        return (outputs**2).mean()

    step = fit(
        model,
        batch,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        device_budget="90%",
        loss=loss,
        method=method,
        quick=True,
        cache_dir=tmp_path,
    )
    assert built[method] > 0
    assert not built[other]
    assert step.plan.method == method
    assert step.plan.device_peak_bytes <= step.plan.device_budget_bytes
    assert step.plan.step_time_s >= step.plan.lower_bound_s * (1 - 1e-9)
    assert step(batch).item() > 0


def _parts(option: Option) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    schedule = schedule_of(option)
    return schedule.forward, schedule.backward
