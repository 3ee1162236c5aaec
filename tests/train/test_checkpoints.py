"""Checkpoints hold everything that the rest of a run depends on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows.api.saving import load_model, save_model
from stowage.stages.ir.errors import ParameterError, PlanMismatchError, StowageError, TableError
from stowage.stages.ir.files import UnwritableError
from stowage.stages.ir.run import StepRecord
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.train.checkpoint import save_checkpoint, save_optimizer
from stowage.stages.train.restore import load_checkpoint, load_optimizer, open_file
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
    with pytest.raises(TableError, match=r"holds the weights of a model alone, which `step\.load_model` reads"):
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
    with pytest.raises(UnwritableError, match="No space"):
        save_checkpoint(path, "run", 2, Contents(model, None), None, [])
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]


class Everything:
    """A model, an optimizer and a schedule after a step, what they hold, and what they are saved as."""

    def __init__(self, folder: Path, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, width: int = 4) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.optimizer = kind(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.path = folder / "checkpoint"
        self.step()

    def step(self) -> None:
        self.model(torch.randn(5, self.model[0].in_features)).pow(2).sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def save(self) -> Path:
        records = [StepRecord(0, 1.0, float("nan"), 0.1, 0.1, float("nan"), -1)]
        save_checkpoint(self.path, "run", 1, Contents(self.model, self.optimizer), self.schedule, records)
        return self.path

    def load(self, path: Path) -> None:
        load_checkpoint(path, "run", Contents(self.model, self.optimizer), self.schedule, "give another")

    def held(self) -> list[str]:
        """Bits of everything that a load could change."""
        tensors = [*self.model.state_dict().values(), *(v for s in self.optimizer.state.values() for v in s.values())]
        bits = [t.detach().reshape(-1).view(torch.uint8).tolist() for t in tensors]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return [repr(x) for x in (bits, groups, self.schedule.state_dict(), torch.get_rng_state().tolist())]


def edited(path: Path, change: Callable[[dict[str, Any]], None], *, sealed: bool) -> None:
    """Change the metadata of a checkpoint; `sealed`: with the hash of the result, as one who means harm would."""
    from safetensors.torch import load_file, safe_open, save_file

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    rest = json.loads(metadata["rest"])
    change(rest)
    metadata["rest"] = json.dumps(rest)
    if sealed:
        del metadata["stowage.digest"]
    save_file(load_file(path), path, metadata)


def set_state(rest: dict[str, Any], to: Any) -> None:
    rest["optimizer"]["dict"][0][1] = to


def exchange(rest: dict[str, Any]) -> None:
    """The momentum of one parameter for the number of steps of another."""
    states = rest["optimizer"]["dict"][0][1]["dict"]
    one, other = (dict(states[i][1]["dict"]) for i in (0, 1))
    one["exp_avg"], other["step"] = other["step"], one["exp_avg"]
    for i, changed in ((0, one), (1, other)):
        states[i][1]["dict"] = [list(item) for item in changed.items()]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a record": lambda rest: rest["records"][0].update(loss="x"),
    "no record": lambda rest: rest.update(records=3),
    "a missing key": lambda rest: rest.pop("optimizer"),
    "a state of no parameter": lambda rest: set_state(rest, {"dict": [[99, {"dict": []}]]}),
    "another one's state": lambda rest: exchange(rest),
    "no state": lambda rest: set_state(rest, 5),
    "a tensor that is not there": lambda rest: set_state(
        rest, {"dict": [[0, {"dict": [["step", {"tensor": "nowhere"}]]}]]}
    ),
    "another kind": lambda rest: rest.update(scheduler={"object": 1}),
    "two kinds": lambda rest: rest.update(scheduler={"dict": [], "list": []}),
    "classes": lambda rest: rest.update(classes=[1]),
    "no schedule": lambda rest: rest.update(scheduler=None),
    "no optimizer": lambda rest: rest.update(optimizer=None),
    "another optimizer": lambda rest: rest.update(classes=["torch.optim.sgd.SGD", rest["classes"][1]]),
    "a schedule's state": lambda rest: rest.update(scheduler={"list": []}),
    "other groups": lambda rest: rest["optimizer"]["dict"][1].__setitem__(1, {"list": []}),
}


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_edited_metadata_is_one_sentence_and_changes_nothing(tmp_path: Path, change: str, sealed: bool) -> None:
    mine = Everything(tmp_path)
    path = mine.save()
    edited(path, CHANGES[change], sealed=sealed)
    mine.step()
    before = mine.held()
    with pytest.raises(StowageError, match=str(path)) as caught:
        mine.load(path)
    assert mine.held() == before
    assert "\n" not in str(caught.value)


def test_the_edits_are_seen_for_what_they_are(tmp_path: Path) -> None:
    """Rewritten without an edit, and without the hash, it loads."""
    mine = Everything(tmp_path)
    path = mine.save()
    saved = mine.held()
    edited(path, lambda rest: None, sealed=True)
    mine.step()
    mine.load(path)
    assert mine.held() == saved


@pytest.mark.parametrize("position", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_a_bit_that_has_flipped_anywhere_is_found(tmp_path: Path, position: float) -> None:
    mine = Everything(tmp_path)
    path = mine.save()
    content = bytearray(path.read_bytes())
    content[int(position * (len(content) - 1))] ^= 4
    path.write_bytes(content)
    before = mine.held()
    with pytest.raises(StowageError, match=str(path)):
        mine.load(path)
    assert mine.held() == before


def test_another_optimizer_a_missing_schedule_and_other_files(tmp_path: Path) -> None:
    mine = Everything(tmp_path)
    path = mine.save()
    other = Everything(tmp_path, torch.optim.SGD)
    optimizer_only, weights, text = tmp_path / "optimizer", tmp_path / "weights", tmp_path / "text"
    save_optimizer(optimizer_only, Contents(mine.model, mine.optimizer))
    save_model(weights, Contents(mine.model, None))
    text.write_text("not tensors at all")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("of somebody else")
    with_schedule = Contents(mine.model, mine.optimizer)
    refusals: list[tuple[str, Callable[[], Any]]] = [
        (
            r"saved with the optimizer torch.optim.adamw.AdamW, and here is torch.optim.sgd.SGD",
            lambda: other.load(path),
        ),
        (r"saved with a scheduler, torch.*StepLR: pass it", lambda: load_checkpoint(path, "run", with_schedule, None)),
        (
            r"saved with an optimizer, .*: give `fit` one",
            lambda: load_checkpoint(path, "run", Contents(mine.model, None), mine.schedule),
        ),
        (r"holds the weights of a model alone, which `step.load_model` reads", lambda: mine.load(weights)),
        (r"holds the state of an optimizer alone", lambda: mine.load(optimizer_only)),
        (r"is no safetensors file", lambda: mine.load(text)),
        (r"is a folder without checkpoint.safetensors", lambda: mine.load(tmp_path / "folder")),
        (r"holds a checkpoint, which `step.load` reads", lambda: load_optimizer(path, with_schedule)),
        (r"holds a checkpoint, which `step.load` reads", lambda: load_model(path, with_schedule)),
        (r"holds the weights of a model alone", lambda: load_optimizer(weights, with_schedule)),
        (r"holds the state of an optimizer alone", lambda: load_model(optimizer_only, with_schedule)),
        (r"There is no model at", lambda: load_model(tmp_path / "nothing", with_schedule)),
        (r"There is no state of an optimizer at", lambda: load_optimizer(tmp_path / "nothing", with_schedule)),
        (
            r"and here is torch.optim.sgd.SGD",
            lambda: load_optimizer(optimizer_only, Contents(other.model, other.optimizer)),
        ),
        (
            r"'0.weight' is torch.float32 of shape \(4, 4\) in the file and torch.float32 of shape \(5, 5\) in",
            lambda: Everything(tmp_path, width=5).load(path),
        ),
    ]
    for said, attempt in refusals:
        before = mine.held()
        with pytest.raises(StowageError, match=said) as caught:
            attempt()
        assert mine.held()[:3] == before[:3]
        assert "damaged" not in str(caught.value), "these files are good"
        assert "delete" not in str(caught.value)


def test_what_ranks_leave_that_were_killed_over_their_first_checkpoint_is_none(tmp_path: Path) -> None:
    mine = Everything(tmp_path)
    begun = tmp_path / "begun"
    begun.mkdir()
    assert mine.load(begun) is None
    (begun / "rank-00000-of-00002-0123.safetensors").write_bytes(b"a part")
    (begun / ".rank-00001-of-00002-0123.safetensors").write_bytes(b"a half")
    before = mine.held()
    assert mine.load(begun) is None
    assert mine.held() == before


def test_what_a_checkpoint_without_optimizer_is_for(tmp_path: Path) -> None:
    mine = Everything(tmp_path)
    save_checkpoint(mine.path, "run", 1, Contents(mine.model, None), None, [])
    before = mine.held()
    with pytest.raises(PlanMismatchError, match="saved without optimizer, and one is given"):
        mine.load(mine.path)
    with pytest.raises(ParameterError, match="There is no checkpoint"):
        open_file(tmp_path / "nothing", "checkpoint", Contents(mine.model, None))
    assert mine.held() == before
