"""A checkpoint of a sharded model, written by `torch.distributed.checkpoint`, is loaded on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import some
from tests.sharding.ranks import run_on_ranks
from tests.sharding.resharded import load, made, unlike_saved


@pytest.fixture(scope="module")
def saved(fit_stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks have saved what they have trained, in shards and whole."""
    folder = tmp_path_factory.mktemp("two ranks")
    run_on_ranks("tests.sharding.resharded", str(fit_stores), str(folder), "save")
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_loads_it_without_sharding(saved: Path) -> None:
    model, optimizer, batch = made()
    load(model, optimizer, saved)
    assert unlike_saved(model, optimizer, saved) == []
    parameters = len(list(model.parameters()))
    assert len(optimizer.state) == parameters
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    others = unlike_saved(model, optimizer, saved)
    assert len(others) >= 4 * parameters, "weights, two means and a count of each have changed: training goes on"


@pytest.mark.parametrize("ranks", some([3, 4], keep=[]))
def test_more_ranks_load_it(ranks: int, saved: Path, fit_stores: Path) -> None:
    found = run_on_ranks("tests.sharding.resharded", str(fit_stores), str(saved), "load", ranks=ranks)
    assert found == [[]] * ranks
