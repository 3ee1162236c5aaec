"""Methods: one table, from which people's names, settings and what a plan may use follow."""

from __future__ import annotations

import typing

import pytest

from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.methods import METHODS, NAMES, PUBLIC, method_of
from stowage.stages.settings import parse_settings
from stowage.stages.settings.models import SolveSettings
from stowage.stages.solve import PlanRequest

FOUND = ("keep_all", "recompute_all", "selective", "tw_remat", "retention", "h_ilp", "h_retention", "h_greedy")


def settings(method: str, **options: object) -> dict[str, object]:
    return {
        "trace": {"model": {"architecture": "gpt2"}},
        "solve": {"method": method, "offload_dir": "lower_tier"},
        **options,
    }


def test_names_are_distinct_and_settings_take_those_that_people_are_told_of() -> None:
    assert len(set(NAMES)) == len(METHODS)
    assert typing.get_args(SolveSettings.model_fields["method"].annotation) == PUBLIC
    assert set(NAMES) - set(PUBLIC) == {"keep_all", "offmate_preprint"}


@pytest.mark.parametrize("name", NAMES)
def test_a_request_is_what_the_table_says(name: str) -> None:
    request, method = PlanRequest(1, name), method_of(name)
    assert request.offloads_only == method.offloads == (name in ("offmate", "offmate_preprint"))
    assert request.recomputes_only == (name not in ("auto", "offmate", "offmate_preprint"))
    assert request.polishes == (name not in ("rotor", "recompute_all", "chen_sqrt", "keep_all"))
    taken = {found for found in FOUND if request.takes(found)}
    expected = {
        "rotor": {"keep_all"},
        "tw_remat": {"tw_remat"},
        "h_ilp": set(FOUND) - {"selective", "tw_remat"},
        "h_retention": set(FOUND) - {"selective", "tw_remat"},
    }
    assert taken == expected.get(name, set(FOUND))


def test_what_takes_the_step_as_one_block_and_what_solves_its_clusters() -> None:
    assert [m.name for m in METHODS if m.whole] == ["hiremate", "h_ilp", "h_retention", "tw_remat"]
    assert {m.name: m.clusters for m in METHODS if m.clusters} == {"h_ilp": "h_ilp", "h_retention": "h_retention"}


def test_an_unknown_method_names_those_there_are() -> None:
    with pytest.raises(ParameterError, match=r"method is one of auto, .*, h_ilp, h_retention, .*, not 'fastest'"):
        method_of("fastest")
    with pytest.raises(ParameterError, match=r"solve.method must be 'auto', .*'h_ilp', 'h_retention'.* is 'fastest'"):
        parse_settings(settings("fastest"))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_pipeline_says_what_a_method_needs_of_other_stages(name: str) -> None:
    method = method_of(name)
    whole = {"partition": {"max_blocks": 1}, "options": {"cluster_formulation": method.clusters or "h_retention"}}
    assert parse_settings(settings(name, **whole)).solve.method == name
    if not method.whole:
        assert parse_settings(settings(name)).solve.method == name
        return
    other = {"options": {"cluster_formulation": "h_retention" if name == "h_ilp" else "h_ilp"}}
    with pytest.raises(ParameterError) as wrong:
        parse_settings(settings(name, **other))
    assert f"solve.method {name} needs another graph or other schedules: set partition.max_blocks to 1" in str(
        wrong.value
    )
    assert (f"options.cluster_formulation to {method.clusters}" in str(wrong.value)) == (method.clusters is not None)
