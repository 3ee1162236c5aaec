"""A new formulation comes in by one row of the table of sources, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stowage.stages.formulations.block.checkmate import checkmate
from stowage.stages.formulations.block.fixed import recompute_all
from stowage.stages.formulations.cluster.answer import Budgets, HAnswer, answer_of
from stowage.stages.formulations.cluster.policies import Incumbents
from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.formulations.cluster.staged_order import HRuns
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.h_graph import HGraph
from stowage.stages.options import sources, store
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.intervals import answering
from stowage.stages.options.parameters import search_of
from stowage.stages.options.sources import SOURCES, ClusterSource, Exact, Fixed, Frontier, OptionSource
from stowage.stages.options.store import OptionStore, option_key
from stowage.stages.options.tasks import GridSize
from stowage.stages.partition.clusters.partition import Limits
from stowage.stages.settings import OptionsSettings
from stowage.stages.solver.outcome import SolverSettings
from tests.options.clusters.made_clusters import clusters_of
from tests.strategies import deep_chain, mlp_block

SMALL = GridSize(peak_budgets=2, save_budgets=2, computations=2)
LIMITS = SolverSettings(time_limit_s=2.0)
CODE = "tests.options.test_sources"


def add(monkeypatch: pytest.MonkeyPatch, source: OptionSource) -> None:
    """One more row, for all who read the table."""
    for module in (sources, store):
        monkeypatch.setattr(module, "SOURCES", (*SOURCES, source))


def formulations(graph: BlockGraph, size: GridSize, **more: object) -> dict[str, int]:
    """Of a block's options, and how many."""
    found = options_for_blocks([graph], None, size=size, settings=LIMITS, **more)[graph.content_hash()]  # type: ignore[arg-type]
    names = [o.formulation for o in found]
    return {name: names.count(name) for name in names}


def toy_frontier(block: BlockGraph, levels: int) -> Sequence[tuple[BlockSchedule, SolveReport]]:
    assert levels > 0
    times = 2 * sum(node.time_s for node in block.nodes)
    return [(schedule, SolveReport("toy", "heuristic", times, times)) for schedule in (recompute_all(block),)]


@pytest.mark.parametrize("exact", [True, False])
def test_a_frontier_takes_part(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    asked: list[int] = []

    def noted(block: BlockGraph, levels: int) -> Sequence[tuple[BlockSchedule, SolveReport]]:
        asked.append(levels)
        return toy_frontier(block, levels)

    rest = tuple(s for s in SOURCES if not isinstance(s, Frontier) and s.name != "recompute_all")
    for module in (sources, store):
        monkeypatch.setattr(module, "SOURCES", (*rest, Frontier("toy", CODE, noted)))
    size = SMALL if exact else GridSize(max_exact_nodes=0, greedy_levels=7)
    found = formulations(mlp_block(), size)
    assert asked == [2 if exact else 7]
    assert exact or found == {"keep_all": 1, "toy": 1}, "nothing else is asked where a block is large"


def test_a_policy_is_always_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, Fixed("toy", CODE, recompute_all))
    assert formulations(mlp_block(), SMALL)["toy"] == 1


def test_an_exact_one_is_asked_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def toy(
        block: BlockGraph, peak_bytes: int, save_bytes: int, limits: SolverSettings, *, hint: object = None
    ) -> tuple[BlockSchedule | None, SolveReport | None]:
        schedule, report = checkmate(block, peak_bytes, save_bytes, limits, hint=hint)  # type: ignore[arg-type]
        return schedule, None if report is None else SolveReport(
            "toy", report.status, report.objective_s, report.bound_s
        )

    graph, size = deep_chain(1), GridSize(3, 3, formulation="toy")
    with pytest.raises(ParameterError, match=r"options\.formulation must be one of 'retention', .*, and is 'toy'"):
        formulations(graph, size)
    add(monkeypatch, Exact("toy", CODE, answering(toy)))
    assert formulations(graph, size)["toy"] > 0
    assert "toy" not in formulations(graph, GridSize(3, 3))


class ToyClusters:
    """Keeps everything, if that fits."""

    def __init__(self, graph: HGraph, settings: SolverSettings) -> None:
        self.data, self.settings = HProblem(graph), settings
        self.incumbents = Incumbents(self.data)

    def smallest_peak(self) -> tuple[HRuns, int]:
        least = min(self.incumbents.policies, key=lambda c: c.cost.peak_bytes)
        return least.runs, least.cost.peak_bytes

    def solve(self, budgets: Budgets, known: Sequence[HAnswer]) -> HAnswer:
        del known
        fitting = self.incumbents.within(*budgets)
        if not fitting:
            return HAnswer(budgets, None)
        return answer_of(self.data, budgets, fitting[0].runs, "heuristic", self.data.floor_s, "toy")


def test_one_of_clusters_is_asked_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = deep_chain(6)
    rows = clusters_of(graph, Limits(top_size=8, size=6))
    size = GridSize(
        2,
        2,
        max_exact_nodes=30,
        greedy_levels=2,
        cluster_peaks=2,
        cluster_saves=1,
        top_peaks=3,
        cluster_formulation="toy",
    )
    add(monkeypatch, ClusterSource("toy", CODE, ToyClusters))
    assert formulations(graph, size, clusters=rows)["toy"] > 0


def test_names_of_parameters_are_looked_up() -> None:
    size, limits = search_of(OptionsSettings(formulation="checkmate", cluster_formulation="h_ilp", time_limit_s=1.5))
    assert (size.formulation, size.cluster_formulation, limits.time_limit_s) == ("checkmate", "h_ilp", 1.5)
    for wrong in ({"formulation": "h_ilp"}, {"cluster_formulation": "retention"}):
        (key,) = wrong
        with pytest.raises(
            ParameterError, match=rf"options\.{key} must be one of '.*', and is '.*'; correct the value"
        ):
            search_of(OptionsSettings(**wrong))  # type: ignore[arg-type]


def test_options_of_other_code_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graph, kept = deep_chain(1), OptionStore(tmp_path)
    first = options_for_blocks([graph], kept, size=SMALL, settings=LIMITS)
    before = option_key(graph.content_hash(), SMALL, LIMITS)
    assert kept.get(before, graph) == first[graph.content_hash()]
    add(monkeypatch, Frontier("toy", CODE, toy_frontier))
    with_toy = option_key(graph.content_hash(), SMALL, LIMITS)
    assert with_toy != before, "its code counts from wherever it comes"
    assert kept.get(with_toy, graph) is None


def test_every_formulation_of_a_block_or_cluster_is_in_the_code_that_is_hashed() -> None:
    for source in SOURCES:
        assert any(source.code == d or source.code.startswith(f"{d}.") for d in store.DECIDING), source.name
