"""What tests of several stages share: one store of plans, and how many examples and which order a run takes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.matrix import THOROUGH
from tests.scheduling import in_order

settings.register_profile("fast", deadline=None, max_examples=THOROUGH // 5)
settings.register_profile("thorough", deadline=None, max_examples=THOROUGH)
settings.load_profile("fast")  # `--hypothesis-profile` is read later and wins


@pytest.fixture(scope="session")
def fit_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store of costs, options and plans for all calls of `fit` in a run, on all workers: the device and each call
    are measured once."""
    folder = tmp_path_factory.getbasetemp()
    shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "fit_stores"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session", autouse=True)
def _solves_in_this_process() -> Iterator[None]:
    """A solver process takes longer to start than a test's blocks take to solve. Those that test such processes ask for
    them by number; in a thorough run `fit` starts them too."""
    with pytest.MonkeyPatch.context() as patch:
        if settings().max_examples < THOROUGH:
            patch.setattr(os, "cpu_count", lambda: 1)
        yield


def pytest_runtest_setup() -> None:
    """A test's weights do not depend on which tests ran before it on the same worker."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long groups first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: in_order(item.nodeid))


def pytest_collection_finish() -> None:
    """What is there from now on, all modules and all tests, the garbage collector need not pass over each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `--dist loadfile`: files that share planned steps go to the same worker."""
    from tests.scheduling import Together

    return Together(config, log) if config.getoption("dist") == "loadfile" else None
