"""What `Lossy` takes, and the batches on which is measured what codes do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from stowage.flows import Lossy, fit
from stowage.flows.api.measured_batches import NONE_LIKE_IT, ONE_BATCH, measured_batches
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.lossy import KINDS, LOOKED_AT


@pytest.mark.parametrize("kinds", [None, 5, [["int8"]], ["int8", 3], "int7"])
def test_what_is_no_kind(kinds: Any) -> None:
    with pytest.raises(ParameterError, match=r"lossy has the kind .*, or 'all'"):
        Lossy(kinds)


def test_all_kinds() -> None:
    assert Lossy().kinds == Lossy("all").kinds == Lossy(["all"]).kinds == Lossy({"int8", "all"}).kinds == tuple(KINDS)


@pytest.mark.parametrize("batches", [5, None, torch.ones(4, 2), {"x": torch.ones(4)}, "abc"])
def test_what_is_no_list_of_batches(batches: Any) -> None:
    with pytest.raises(ParameterError, match=r"batches of lossy is of .*: give a list of batches, or a loader of them"):
        Lossy("int8", batches=batches)


@pytest.mark.parametrize("limit", [-0.1, math.nan, math.inf, True, "1%", None])
def test_what_is_no_limit(limit: Any) -> None:
    with pytest.raises(ParameterError, match="max_gradient_error of lossy is"):
        Lossy("int8", limit)


@pytest.mark.parametrize("limit", [1e160, 1.7e308, 10**400])
def test_a_limit_beyond_all_errors_is_none(limit: float, fit_stores: Path) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), torch.randn(64, 32)
    step = fit(
        model,
        batch,
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_budget="90%",
        loss=lambda outputs, _: outputs.square().mean(),
        lossy=Lossy("int8", limit),
        cache_dir=fit_stores,
        quick=True,
        say=lambda text: None,
    )
    assert math.isfinite(float(step(batch)))


def batches(*rows: int) -> list[torch.Tensor]:
    return [torch.ones(n, 2) * number for number, n in enumerate(rows)]


def test_batches_of_the_steps_own_form_are_looked_for() -> None:
    """Those of a loader whose lengths vary are not all alike, and the first four may be of other lengths."""
    given = batches(5, 5, 3, 5, 5, 3, 3, 3, 3)
    own = torch.zeros(3, 2)
    for one in (given, tuple(given), DataLoader(given, batch_size=None), iter(given)):
        found, notice = measured_batches(own, Lossy("int8", batches=one))
        assert [int(b[0, 0]) for b in found] == [2, 5, 6, 7]
        assert notice == ""


def test_one_pass_is_enough_for_several_programs() -> None:
    lossy = Lossy("int8", batches=(b for b in batches(3, 5, 3, 5)))
    assert [len(measured_batches(torch.zeros(n, 2), lossy)[0]) for n in (3, 5, 3)] == [2, 2, 2]


def test_what_is_said_of_too_few() -> None:
    own = torch.zeros(3, 2)
    assert measured_batches(own, Lossy("int8")) == ([own], ONE_BATCH)
    assert measured_batches(own, Lossy("int8", batches=batches(3, 5)))[1] == ONE_BATCH
    assert measured_batches(own, Lossy("int8", batches=[*batches(5, 5), "abc", None])) == ([own], NONE_LIKE_IT)


def test_an_endless_loader_ends() -> None:
    seen = 0

    class Endless:
        def __iter__(self) -> Iterator[torch.Tensor]:
            nonlocal seen
            while True:
                seen += 1
                yield torch.zeros(5, 2)

    own = torch.zeros(3, 2)
    assert measured_batches(own, Lossy("int8", batches=Endless())) == ([own], NONE_LIKE_IT)
    assert seen <= LOOKED_AT + 1
