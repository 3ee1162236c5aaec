"""Blocks solved in threads, in processes and on a Dask cluster give the same files, byte for byte."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dask
import pytest
import yaml
from distributed import LocalCluster

from stowage.flows.pipeline import fan_out as _fan_out
from stowage.flows.pipeline.fan_out import SolvedBlock, solve_missing_blocks
from stowage.flows.pipeline.prefect_imports import NO_CACHE, flow, task
from stowage.flows.pipeline.task_runner import runner_of
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.ir.graph import Block
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.table import write_rows
from stowage.stages.options.tasks import GridSize
from stowage.stages.partition.clusters.partition import Limits
from stowage.stages.settings import OptionsSettings
from stowage.stages.solver.outcome import SolverSettings
from tests.options.clusters.made_clusters import clusters_of
from tests.strategies import attention_block, deep_chain

OPTIONS = {"peak_budgets": 2, "save_budgets": 2, "time_limit_s": 1.0, "max_exact_nodes": 20, "workers": 2}
CLUSTERS = Limits(top_size=3, size=3, smallest=2)
LOG = logging.getLogger("fan out")


def project(root: Path, **more: Any) -> Path:
    """A folder with three blocks, two of them equal, and what the flow reads of a project."""
    parameters = {"trace": {"model": {"architecture": "gpt2"}}, "options": OPTIONS | more}
    root.mkdir()
    (root / "params.yaml").write_text(yaml.safe_dump(parameters))
    graphs = [deep_chain(1), attention_block(), deep_chain(1)]
    rows = [
        Block(i, graph.content_hash(), graph.to_json(), (), (), f"block {i}", 0, ()) for i, graph in enumerate(graphs)
    ]
    write_rows(root / "artifacts" / "partition" / "blocks.parquet", Block, rows)
    write_rows(
        root / "artifacts" / "partition" / "clusters.parquet", BlockCluster, 2 * clusters_of(graphs[1], CLUSTERS)
    )
    return root


@flow(name="fan out")
def solve(root: Path) -> int:
    """What the chain of stages does before `options`."""
    return solve_missing_blocks(root, LOG)


def stored(root: Path) -> dict[str, bytes]:
    """Content of the store, by name."""
    return {path.name: path.read_bytes() for path in sorted((root / ".stowage" / "options").iterdir())}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A scheduler, and one worker in a process of its own.

    Dask writes settings of malloc and OpenMP for its workers into this process' environment, and leaves them there.
    """
    with (
        patch.dict(os.environ),
        LocalCluster(n_workers=1, threads_per_worker=2, protocol="tcp://", dashboard_address=None) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def by_threads(tmp_path_factory: pytest.TempPathFactory, prefect_home: None) -> dict[str, bytes]:
    root = project(tmp_path_factory.mktemp("threads") / "project")
    assert solve(root) == 2
    found = stored(root)
    assert len(found) == 2
    assert solve(root) == 0
    assert stored(root) == found
    return found


@pytest.mark.usefixtures("prefect_home")
def test_processes_find_what_threads_find(tmp_path: Path, by_threads: dict[str, bytes]) -> None:
    root = project(tmp_path / "project", task_runner="processes")
    assert solve(root) == 2
    assert stored(root) == by_threads


@pytest.mark.usefixtures("prefect_home")
def test_a_dask_cluster_finds_what_threads_find(
    tmp_path: Path, by_threads: dict[str, bytes], cluster: LocalCluster
) -> None:
    address = cluster.scheduler_address
    root = project(tmp_path / "project", task_runner="dask", dask_scheduler=address, workers=None)
    assert solve(root) == 2
    assert stored(root) == by_threads


@pytest.mark.usefixtures("prefect_home")
def test_a_scheduler_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    root = project(tmp_path / "project", task_runner="dask", dask_scheduler="tcp://127.0.0.1:1")
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(StowageError, match=r"No Dask scheduler answers at tcp://127\.0\.0\.1:1: start it"),
    ):
        solve(root)


@task(cache_policy=NO_CACHE)
def elsewhere(
    name: str, graph: str, clusters: object, size: GridSize, limits: SolverSettings, workers: int
) -> SolvedBlock:
    """A worker with other code."""
    return SolvedBlock(f"{name} solved by other code", ())


@pytest.mark.usefixtures("prefect_home")
def test_options_of_other_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fan_out, "solve_block", elsewhere)
    root = project(tmp_path / "project")
    with pytest.raises(StowageError, match="solved by another version of Stowage"):
        solve(root)
    assert not (root / ".stowage" / "options").exists()


def test_without_prefect_dask_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("prefect_dask", "prefect_dask.task_runners"):
        monkeypatch.setitem(sys.modules, module, None)
    cluster = OptionsSettings(task_runner="dask", dask_scheduler="tcp://127.0.0.1:8786")
    with pytest.raises(ParameterError, match=r"pip install prefect-dask"):
        runner_of(cluster, 1)
    runner_of(OptionsSettings(), 1)
