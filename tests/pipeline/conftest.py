"""Projects in temporary folders: a toy whose stages are one-liners, and a copy of this one with a tiny model."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import websockets.asyncio.connection as connection
import yaml
from installed import Installed, build, copy_of_the_tree, install
from pipeline_projects import ROOT, TINY, TOY_STAGE, TOY_STAGES, commit, copied_project, run, set_parameters


@pytest.fixture(scope="session", autouse=True)
def _connections_draw_elsewhere() -> None:
    """Prefect's connections stay open in threads, and draw numbers to keep alive: not from the generator whose state
    other tests compare."""
    connection.random = random.Random()  # type: ignore[attr-defined]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A Git and DVC project of two stages that only write their parameters down."""
    folder = tmp_path / "toy"
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".stowage" / "costs").mkdir(parents=True)
    for name in (".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore"):
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "toy.py").write_text(TOY_STAGE)
    stages = {
        name: {
            "cmd": f"python toy.py {name}",
            "deps": ["toy.py", *deps],
            "params": [parameter],
            "outs": [out],
        }
        for name, (parameter, deps, out) in TOY_STAGES.items()
    }
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    parameters = {"trace": {"model": {"architecture": "gpt2"}, "seed": 0}, "solve": {"device_budget": "50%"}}
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters, sort_keys=False))
    run(["git", "init", "--quiet", "--initial-branch", "main"], folder)
    commit(folder, "Toy")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository, edits included, with a tiny GPT-2, planned and trained through DVC, committed."""
    folder = copied_project(tmp_path_factory.mktemp("tiny") / "project")
    set_parameters(folder, TINY)
    run([sys.executable, "-m", "stowage.stages.device"], folder)
    run(["dvc", "repro"], folder)
    commit(folder, "Planned")
    return folder


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect database of the tests' own, and one temporary server for all of them."""
    from prefect.testing.utilities import prefect_test_harness

    from stowage.flows.pipeline import prefect_imports

    assert prefect_imports.DEFAULTS.keys() <= os.environ.keys()
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout, to build distributions from."""
    return copy_of_the_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="session")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout's wheel."""
    return build(tree, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment with this checkout's wheel."""
    return install(tmp_path_factory.mktemp("installed"), wheel)
