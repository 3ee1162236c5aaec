"""What fails on one rank alone, outside of the exchange of tensors, ends all ranks promptly, in one sentence each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import fit
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.runtime.shadow.guard import Guard, NoRoom
from stowage.stages.workload.randomness import seeded
from tests.sharding.processes import on_ranks

FAILS = "STOWAGE_TEST_FORWARD_FAILS"
"""A variable of the environment: no trace looks there."""

SOON_S = 30.0
"""Half of the timeout of the process group."""


class _Net(nn.Module):
    """A network whose forward fails where a variable of the environment says so."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x).relu()
        if os.environ.get(FAILS):
            raise ValueError("out of luck")
        return self.last(hidden)


def _square(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


def _batch(rows: int = 4) -> dict[str, torch.Tensor]:
    with seeded(rows + dist.get_rank()):
        return {"x": torch.randn(rows, 8)}


def _fit(stores: Path, **more: Any) -> TrainingStep:
    model = _Net().train()
    given: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | more
    return fit(
        model,
        _batch(),
        device_budget="1GiB",
        loss=_square,
        quick=True,
        cache_dir=stores,
        group=dist.group.WORLD,
        say=lambda text: None,
        **given,
    )


def _said(work: Callable[[], Any]) -> str:
    began = time.monotonic()
    try:
        work()
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - began
    return said if took_s < SOON_S else f"after {took_s:.0f} s: {said}"


def _on_the_last(work: Callable[[], Any]) -> Any:
    """Do something on the last rank alone."""
    return work() if dist.get_rank() == dist.get_world_size() - 1 else None


def _failing(work: Callable[[], Any]) -> str:
    """Say what becomes of `work` while the forward fails on the last rank."""
    _on_the_last(lambda: os.environ.update({FAILS: "1"}))
    try:
        return _said(work)
    finally:
        os.environ.pop(FAILS, None)


def _preparing(stores: Path) -> dict[str, str]:
    """Mistakes of one rank before it has a step."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        _on_the_last(lambda: 1 / 0)
        return torch.optim.SGD(parameters, lr=0.1)

    def resize(batch: Any, form: Any) -> Any:
        _on_the_last(lambda: batch["no such tensor"])
        return {"x": batch["x"][:form]}

    found = {
        "trace": _failing(lambda: _fit(stores)),
        "optimizer": _said(lambda: _fit(stores, optimizer=optimizer)),
        "resize": _said(lambda: _fit(stores, forms=[2], resize=resize)),
        "argument": _said(lambda: _fit(stores, **(_on_the_last(lambda: {"method": "no such"}) or {}))),
        "accumulate": _said(lambda: _fit(stores, **(_on_the_last(lambda: {"accumulate": 0}) or {}))),
    }
    folder = stores / f"file of {dist.get_rank()}"
    _on_the_last(lambda: folder.write_text("not a folder"))
    found["folder"] = _said(lambda: _fit(stores, offload_dir=folder))
    found["fine"] = _said(lambda: _fit(stores))
    return found


def _running(stores: Path) -> dict[str, Any]:
    """Mistakes of one rank beside training, after each of which all train on."""
    step, beside = _fit(stores, check="always"), _fit(stores, check="never")
    found: dict[str, Any] = {}

    def room(guard: Guard, nbytes: int) -> None:
        raise NoRoom(nbytes)

    def note(name: str, said: str) -> None:
        found[name] = said
        found[f"{name}, then"] = step(_batch()).item() == beside(_batch()).item()

    step(_batch()), beside(_batch())
    note("plain forward", _failing(lambda: step(_batch())))
    with (
        mock.patch.object(Guard, "take", room) if dist.get_rank() else mock.patch.object(Guard, "seen", 0, create=True)
    ):
        before = step(_batch()).item()
    note("no room", str(before == beside(_batch()).item()))
    note("new form", _failing(lambda: step(_batch(6))))
    note("evaluation", _failing(lambda: step.evaluate(_batch())))
    step.evaluate(_batch())
    note("plain evaluation", _failing(lambda: step.evaluate(_batch())))
    note("batch", _said(lambda: step(_batch() if dist.get_rank() == 0 else {"x": "no tensor"})))

    def lent() -> None:
        with step.on_device():
            _on_the_last(lambda: 1 / 0)
        step(_batch())

    found["lent"] = _said(lent)
    return found


def test_before_there_is_a_step(fit_stores: Path) -> None:
    first, last = on_ranks(2, _preparing, fit_stores)
    assert first.pop("fine") == last.pop("fine") == "nothing"
    for name in ("trace", "optimizer", "resize", "argument", "accumulate", "folder"):
        assert first[name].startswith("RankError: Rank 1 "), (name, first[name])
        assert last[name] != "nothing"
        assert not last[name].startswith("after"), last[name]
    assert "out of luck" in first["trace"]
    assert "out of luck" in last["trace"]
    assert "division by zero" in first["optimizer"]


def test_beside_training(fit_stores: Path) -> None:
    first, last = on_ranks(2, _running, fit_stores)
    for name in ("plain forward", "new form", "evaluation", "plain evaluation", "batch"):
        assert first[name].startswith("RankError: Rank 1 "), (name, first[name])
        assert not last[name].startswith(("RankError", "after", "nothing")), (name, last[name])
        assert first[f"{name}, then"]
        assert last[f"{name}, then"]
    assert first["plain forward"] == "RankError: Rank 1 failed: ValueError: out of luck"
    assert last["plain forward"] == "ValueError: out of luck"
    assert first["no room"] == last["no room"] == "True"
    assert first["no room, then"]
    assert last["no room, then"]
    assert first["lent"].startswith("RankError: Rank 0 "), first["lent"]
    assert last["lent"].startswith("ZeroDivisionError"), last["lent"]
