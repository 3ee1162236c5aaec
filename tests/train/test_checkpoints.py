"""Checkpoints hold everything that the rest of a run depends on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.stages.ir.errors import PlanMismatchError, TableError
from stowage.stages.ir.run import StepRecord
from stowage.stages.runtime.contents import Contents
from stowage.stages.train.checkpoint import load_checkpoint, save_checkpoint
from tests.runtime.beside_eager import prepare, same
from tests.solve.prepared import Prepared
from tests.train.small_run import CutOffError, SmallRun, adamw, batch_at, build


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(build, adamw)


def timeless(records: list[StepRecord]) -> list[str]:
    """Records without wall times; as text, because NaN is not equal to itself."""
    return [repr(replace(r, time_s=0.0)) for r in records]


def test_a_run_that_is_cut_off_ends_like_one_that_is_not(tmp_path: Path, prepared: Prepared) -> None:
    whole = SmallRun(prepared)
    expected = whole.train(tmp_path / "whole.safetensors", 9)
    for die_at in (3, 5, 8):
        checkpoint = tmp_path / f"{die_at}.safetensors"
        with pytest.raises(CutOffError):
            SmallRun(prepared).train(checkpoint, 9, die_at=die_at)
        again = SmallRun(prepared)
        found = again.train(checkpoint, 9)
        assert timeless(found.records) == timeless(expected.records)
        assert same(again.model.state_dict(), whole.model.state_dict())
        assert same(again.optimizer.state_dict(), whole.optimizer.state_dict())
        assert again.schedule.state_dict() == whole.schedule.state_dict()


def test_a_run_without_its_random_state_would_differ(tmp_path: Path, prepared: Prepared) -> None:
    """Else the test above would say nothing about it."""
    runs = []
    for seed in (1, 2):
        run = SmallRun(prepared)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            runs.append(float(run.program(batch_at(0))))
    assert runs[0] != runs[1]


def test_everything_comes_back(tmp_path: Path, prepared: Prepared) -> None:
    path = tmp_path / "checkpoint.safetensors"
    run = SmallRun(prepared)
    run.train(tmp_path / "unused", 3, every=100)
    records = [StepRecord(0, 1.5, float("nan"), 0.1, 0.2, float("nan"), -1)]
    state = torch.get_rng_state()
    save_checkpoint(path, "run", 3, Contents(run.model, run.optimizer), run.schedule, records)
    other = SmallRun(prepared)
    torch.manual_seed(99)
    found = load_checkpoint(path, "run", Contents(other.model, other.optimizer), other.schedule)
    assert found is not None
    assert found.iteration == 3
    assert repr(found.records) == repr(records)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(other.model.state_dict(), run.model.state_dict())
    assert same(other.optimizer.state_dict(), run.optimizer.state_dict())
    groups = other.optimizer.param_groups
    assert [g["betas"] for g in groups] == [(0.9, 0.999), (0.8, 0.9)]
    assert type(groups[0]["betas"]) is tuple
    assert other.schedule.state_dict() == run.schedule.state_dict()
    assert os.listdir(tmp_path) == [path.name]


def test_no_checkpoint(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none", "run", Contents(nn.Linear(1, 1), None), None) is None


def test_without_optimizer_and_schedule(tmp_path: Path) -> None:
    path, model, other = tmp_path / "checkpoint", nn.Linear(2, 2), nn.Linear(2, 2)
    save_checkpoint(path, "run", 1, Contents(model, None), None, [])
    assert load_checkpoint(path, "run", Contents(other, None), None) is not None
    assert same(model.state_dict(), other.state_dict())


def test_tied_weights_and_windows_on_one_tensor_are_saved(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(2, 3, 3)
            self.one, self.two = nn.Parameter(whole[0]), nn.Parameter(whole[1].t())
            self.again = self.one

    path, model, other = tmp_path / "checkpoint", Tied(), Tied()
    save_checkpoint(path, "run", 1, Contents(model, None), None, [])
    load_checkpoint(path, "run", Contents(other, None), None)
    assert same(model.state_dict(), other.state_dict())
    assert other.again is other.one


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_a_truncated_checkpoint_is_one_sentence(tmp_path: Path, share: float) -> None:
    path, model = tmp_path / "checkpoint", nn.Linear(8, 8)
    save_checkpoint(path, "run", 1, Contents(model, torch.optim.AdamW(model.parameters())), None, [])
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(TableError) as caught:
        load_checkpoint(path, "run", Contents(model, None), None)
    assert str(path) in str(caught.value)
    assert "is damaged: delete it" in str(caught.value)
    assert same(model.state_dict(), before)


def test_a_foreign_safetensors_file_is_one_sentence(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(TableError, match="is damaged"):
        load_checkpoint(path, "run", Contents(nn.Linear(1, 1), None), None)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "checkpoint", nn.Linear(1, 1)
    save_checkpoint(path, "run", 1, Contents(model, None), None, [])
    with pytest.raises(PlanMismatchError, match="belongs to another run"):
        load_checkpoint(path, "other run", Contents(model, None), None)


@pytest.mark.parametrize(
    "other", [nn.Linear(3, 3), nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(2)], ids=["shape", "names", "buffers"]
)
def test_a_checkpoint_of_another_model_is_one_sentence(tmp_path: Path, other: nn.Module) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, "run", 1, Contents(nn.Linear(2, 2), None), None, [])
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises((TableError, PlanMismatchError)) as caught:
        load_checkpoint(path, "run", Contents(other, None), None)
    assert str(path) in str(caught.value)
    assert same(other.state_dict(), before), "nothing is half loaded"


def test_a_checkpoint_is_written_beside_and_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "checkpoint", nn.Linear(2, 2)
    save_checkpoint(path, "run", 1, Contents(model, None), None, [])
    old = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(path, "run", 2, Contents(model, None), None, [])
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]
