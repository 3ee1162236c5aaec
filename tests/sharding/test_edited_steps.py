"""A step that lacks a wait, a start, or the one for the other, fails: each such line of a plan is needed.

Collectives are delayed, so that what they write is not there before its wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from stowage.flows import fit
from stowage.flows.planning.planned import Planned
from stowage.stages.device.rates.collectives import CollectiveRates
from stowage.stages.runtime.executors.base import ExecutablePlan
from stowage.stages.runtime.program import source_hash
from stowage.stages.runtime.sharding.ranks import Ranks
from tests.sharding.late import Delay
from tests.sharding.processes import on_ranks
from tests.sharding.recipes import OPTIMIZERS, RECIPES

Edit = Callable[[list[str]], list[str]]

WAIT = re.compile(r"run\.(gathered|scattered)\(")
GATHER = re.compile(r'( *)run\.gather\("(\w+)", (.*)\)  #')


def _run(edit: Edit, stores: Path) -> tuple[str, list[str]]:
    """Run one iteration of an edited step in a group of its own; return what is said, and the text before the edit."""
    recipe, text = RECIPES["odd"](), []
    real = Planned.executable

    def edited(planned: Planned) -> ExecutablePlan:
        plan = real(planned)
        text[:] = plan.source.split("\n")
        source = "\n".join(edit(list(text)))
        return replace(plan, source=source, manifest=replace(plan.manifest, source_hash=source_hash(source)))

    group = dist.new_group(timeout=timedelta(seconds=30))
    rates = CollectiveRates(bytes_per_s=1e9, start_s=1e-3)  # measured anew in each group, they would give other plans
    with (
        Delay("").all(),
        mock.patch.object(Planned, "executable", edited),
        mock.patch.object(Ranks, "rates", return_value=rates),
    ):
        try:
            step = fit(
                recipe.model, recipe.batch(0), OPTIMIZERS["adamw"](recipe.model.parameters()), device_budget="100%",
                loss=recipe.loss, cache_dir=stores, quick=True, group=group, check="never", say=lambda text: None,
            )  # fmt: skip
            found = str(step(recipe.batch(dist.get_rank())).item() > 0)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    return found, text


def _without(number: int, line: str) -> Edit:
    def edit(lines: list[str]) -> list[str]:
        assert lines[number] == line
        return lines[:number] + lines[number + 1 :]

    return edit


def _all(stores: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["nothing"], lines = _run(lambda lines: lines, stores)
    waits = [number for number, line in enumerate(lines) if WAIT.search(line)]
    found["waits"] = {lines[number].strip(): _run(_without(number, lines[number]), stores)[0] for number in waits}
    starts = [number for number, line in enumerate(lines) if GATHER.match(line)]
    found["starts"] = {lines[number].strip(): _run(_without(number, lines[number]), stores)[0] for number in starts}
    start = lines[starts[0]]
    found["twice"] = _run(lambda lines: [*lines[: starts[0]], start, *lines[starts[0] :]], stores)[0]
    end = max(number for number, line in enumerate(lines) if line.strip().startswith("return "))
    found["never"] = _run(lambda lines: [*lines[:end], start, *lines[end:]], stores)[0]
    return found


def test_each_line_of_a_collective_is_needed(fit_stores: Path) -> None:
    found, other = on_ranks(2, _all, fit_stores)
    assert found == other
    assert found["nothing"] == "True"
    assert {match.group(1) for line in found["waits"] if (match := WAIT.search(line))} == {"gathered", "scattered"}
    for line, said in found["waits"].items():
        names = [name.strip() for name in line.partition(" = ")[0].split(",")]
        assert said.startswith(("UnboundLocalError: ", "PlanMismatchError: ")), (line, said)
        refused = "which no generated step has, and is not run" in said  # what the wait makes is read, and not made
        assert refused or any(name in said for name in names), (line, said)
    assert len(found["starts"]) > 1
    for line, said in found["starts"].items():
        key = line.split('"')[1]
        assert said == f"PlanMismatchError: The plan waits for the gather of '{key}', which it has not started.", said
    key = next(iter(found["starts"])).split('"')[1]
    assert found["twice"] == (
        f"PlanMismatchError: The plan starts the gather of '{key}' again before it has waited for it."
    )
    assert found["never"] == (
        f"PlanMismatchError: The plan starts the gather of '{key}' and never waits for it: nothing may read what it "
        "gives."
    )
