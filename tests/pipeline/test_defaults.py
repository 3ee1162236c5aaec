"""Every default is written once: settings, `fit` and the stages have the same objects, `params.yaml` its values."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml

from stowage.flows import best_batch, fit
from stowage.flows.planning.effort import Effort
from stowage.stages.ir import defaults
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.parameters import search_of
from stowage.stages.options.tasks import GridSize
from stowage.stages.partition import Limits, make_chains
from stowage.stages.settings import load_settings
from stowage.stages.settings.models import OptionsSettings, PartitionSettings, ProfileSettings, SolveSettings
from stowage.stages.solve import PlanRequest

ROOT = Path(__file__).parents[2]
EFFORT, SIZE, LIMITS, REQUEST = Effort(), GridSize(), Limits(), PlanRequest(1)

PLACES = {
    "METHOD": (
        "solve.method",
        SolveSettings().method,
        REQUEST.method,
        inspect.signature(fit).parameters["method"].default,
    ),
    "SECONDS_PER_CALL": ("profile.seconds_per_call", ProfileSettings().seconds_per_call, EFFORT.seconds_per_call),
    "MIN_SAMPLES": ("profile.min_samples", ProfileSettings().min_samples, EFFORT.min_samples),
    "MAX_BLOCKS": (
        "partition.max_blocks",
        PartitionSettings().max_blocks,
        inspect.signature(make_chains).parameters["max_blocks"].default,
    ),
    "CLUSTER_SIZE": ("partition.cluster_size", PartitionSettings().cluster_size, LIMITS.size),
    "TOP_SIZE": ("partition.top_size", PartitionSettings().top_size, LIMITS.top_size),
    "ALPHA": ("partition.alpha", PartitionSettings().alpha, LIMITS.alpha),
    "MAX_EXACT_NODES": (
        "options.max_exact_nodes",
        OptionsSettings().max_exact_nodes,
        SIZE.max_exact_nodes,
        inspect.signature(make_chains).parameters["max_exact_nodes"].default,
    ),
    "PEAK_BUDGETS": ("options.peak_budgets", OptionsSettings().peak_budgets, SIZE.peak_budgets),
    "SAVE_BUDGETS": ("options.save_budgets", OptionsSettings().save_budgets, SIZE.save_budgets),
    "SOLVE_SECONDS": ("options.time_limit_s", OptionsSettings().time_limit_s, EFFORT.solver.time_limit_s),
    "FORMULATION": ("options.formulation", OptionsSettings().formulation, SIZE.formulation),
    "CLUSTER_FORMULATION": (
        "options.cluster_formulation",
        OptionsSettings().cluster_formulation,
        SIZE.cluster_formulation,
    ),
    "MEMORY_SLOTS": ("solve.memory_slots", SolveSettings().memory_slots, EFFORT.slots, REQUEST.slots),
    "O_ILP_SECONDS": ("solve.time_limit_s", SolveSettings().time_limit_s, REQUEST.o_ilp_limits.time_limit_s),
    "O_ILP_GAP": ("solve.gap", SolveSettings().gap, REQUEST.o_ilp_limits.gap),
    "O_ILP_SEARCHES": ("", EFFORT.o_ilp_searches, REQUEST.o_ilp_searches),
    "EVICTION_RULES": ("", EFFORT.eviction_rules, REQUEST.eviction_rules),
    "CUT_SECONDS": ("", EFFORT.cut_seconds),
    "LARGEST_BATCH": ("", inspect.signature(best_batch).parameters["largest"].default),
}


def test_all_of_them_are_compared() -> None:
    assert {name for name in vars(defaults) if name.isupper()} == set(PLACES)


@pytest.mark.parametrize("name", PLACES)
def test_a_default_is_one_object(name: str) -> None:
    key, *places = PLACES[name]
    assert places
    assert all(value is getattr(defaults, name) for value in places)
    if key:
        section, _, parameter = key.partition(".")
        content = yaml.safe_load((ROOT / "params.yaml").read_text())
        assert content[section][parameter] == getattr(defaults, name)


def test_what_params_yaml_searches_is_what_fit_does() -> None:
    size, limits = search_of(load_settings(ROOT / "params.yaml").options)
    assert (size, limits) == (EFFORT.grid, EFFORT.solver)
    assert options_for_blocks([]) == {}
