"""Checkpoints of sharded runs: resumed on as many ranks, on more, on one process, and from one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model

from tests.matrix import some
from tests.sharding.ranks import run_on_ranks
from tests.sharding.resuming import (
    AFTER,
    BEFORE,
    TIGHT,
    WHOLE,
    WIDE,
    Odd,
    Training,
    adamw,
    contents_of,
    digest,
    objective,
    recipe_of,
    restored,
)

LIMIT_S = 900.0
"""Long tests plan twice on a machine that runs more than one thing."""
MODULE = "tests.sharding.resuming"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Two ranks that have trained without an interruption, and saved in the middle."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_on_ranks(MODULE, "refuse", str(folder), WHOLE, limit_s=LIMIT_S)


def continued(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in plain PyTorch from the whole state that the ranks had, on rank 0's batches."""
    whole = load_file(folder / "whole.safetensors")
    recipe = recipe_of("", len(whole["first.bias"]))
    optimizer, schedule = restored(whole, recipe)
    torch.set_rng_state(whole["generator"])
    losses = []
    for i in range(BEFORE, BEFORE + AFTER):
        optimizer.zero_grad()
        loss = objective(recipe.model, recipe.batch(100 * i))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, contents_of(recipe.model, optimizer)


def go_on(folder: Path, saved: str, ranks: int, checkpoint: str = "checkpoint", recipe: str = "") -> None:
    """Fail unless so many ranks load a checkpoint whole, and then train like plain PyTorch from that state."""
    arguments = ("beside", str(folder), WHOLE, checkpoint, recipe)
    for run in run_on_ranks(MODULE, *arguments, ranks=ranks, limit_s=LIMIT_S):
        assert run["loaded"] == saved
        assert run["wrong"] == []


def test_as_many_ranks_go_on_as_if_nothing_had_happened(trained: tuple[Path, list[Any]]) -> None:
    folder, runs = trained
    again = run_on_ranks(MODULE, "resume", str(folder), WHOLE, "checkpoint", limit_s=LIMIT_S)
    assert again[0]["loaded"] == runs[0]["saved"]
    for before, after in zip(runs, again, strict=True):
        assert (after["after"], after["end"]) == (before["after"], before["end"])


def test_one_process_goes_on_from_the_whole_state(trained: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, runs = trained
    run = Training(tmp_path, WHOLE, shift=1.0)
    run.load(folder / "checkpoint")
    assert digest(run.whole()) == runs[0]["saved"]
    found = run.train(0, BEFORE, BEFORE + AFTER)
    losses, expected = continued(folder)
    assert found == losses
    assert {n for n, t in run.whole().items() if not torch.equal(t, expected[n])} == set()


@pytest.mark.long
def test_three_ranks_go_on_from_two_and_two_from_one_process(trained: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, runs = trained
    go_on(folder, runs[0]["saved"], 3)
    one = Training(tmp_path, WHOLE, shift=1.0)
    one.load(folder / "checkpoint")
    one.save(folder / "one process")
    go_on(folder, runs[0]["saved"], 2, "one process")


@pytest.mark.parametrize(
    ("recipe", "before", "after"), some([("", 4, 2), ("t5", 4, 2), ("t5", 2, 3), ("llama_lora", 2, 3)], keep=[])
)
def test_other_numbers_of_ranks_go_on(recipe: str, before: int, after: int, tmp_path: Path) -> None:
    """Weights that are tied, and weights that do not train, are dealt out anew too."""
    runs = run_on_ranks(MODULE, "train", str(tmp_path), WHOLE, "", recipe, ranks=before, limit_s=LIMIT_S)
    go_on(tmp_path, runs[0]["saved"], after, recipe=recipe)


def test_what_one_process_saves_and_ranks_save_is_read_by_others(trained: tuple[Path, list[Any]]) -> None:
    folder, _ = trained
    whole = load_file(folder / "whole.safetensors")
    model = Odd()
    load_model(model, str(folder / "weights.safetensors"))
    assert all(torch.equal(p, whole[n]) for n, p in model.named_parameters())
    wanted = [n for n, p in model.named_parameters() if n not in ("turned", "scale")]  # those lie in another order
    found = {f"model/{n}": torch.zeros_like(whole[n]) for n in wanted}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is loaded in one process
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "checkpoint")))
    assert all(torch.equal(found[f"model/{n}"], whole[n]) for n in wanted)


def test_states_saved_alone_are_whole(trained: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, _ = trained
    run = Training(tmp_path, WHOLE, shift=1.0)
    run.step.load_model(folder / "weights.safetensors")
    run.step.load_optimizer(folder / "optimizer.safetensors")
    expected, found = load_file(folder / "whole.safetensors"), run.whole()
    assert {n for n, t in found.items() if not torch.equal(t, expected[n])} == set()
    model = Odd()
    optimizer = adamw(model)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    for name, parameter in model.named_parameters():
        for key, state in optimizer.state.get(parameter, {}).items():
            assert torch.equal(state, expected[f"{name}::{key}"])


def test_what_cannot_be_saved_or_loaded_is_refused_on_all_ranks(trained: tuple[Path, list[Any]]) -> None:
    said = [run["refused"] for run in trained[1]]
    for words, other in zip(*said, strict=True):
        assert words
        assert other
    half, weights, states, places, file, nothing, killed, damaged = said[0]
    assert half == said[1][0]
    assert "Rank 1 could not write its part of" in half
    assert "checkpoint: no room" in half
    assert "Odd.state_dict() was called while 'turned' is dealt out to ranks" in weights
    assert "AdamW.state_dict() was called while 'turned::exp_avg' is dealt out to ranks" in states
    assert "Ranks save to different places" in places
    assert "a file is a file, and the checkpoint of several ranks is a folder" in file
    assert "There is no checkpoint at" in nothing
    assert "There is no checkpoint at" in killed
    assert "is damaged, or was changed after it was written" in damaged
    assert "is damaged, or was changed after it was written" in said[1][7]


def test_a_save_that_fails_leaves_no_other_files(trained: tuple[Path, list[Any]]) -> None:
    names = sorted(path.name for path in (trained[0] / "checkpoint").iterdir())
    assert len(names) == 3
    assert names[0] == "checkpoint.safetensors"
    assert not list(trained[0].rglob("*.pkl")) + list(trained[0].rglob(".metadata"))


@pytest.mark.long
def test_states_in_the_lower_tier_are_read_and_written_one_at_a_time(tmp_path: Path) -> None:
    runs = run_on_ranks(MODULE, "train", str(tmp_path), TIGHT, limit_s=LIMIT_S)
    assert runs[0]["slots"] > 0
    again = run_on_ranks(MODULE, "resume", str(tmp_path), TIGHT, "checkpoint", limit_s=LIMIT_S)
    assert again[0]["loaded"] == runs[0]["saved"]
    assert [(run["after"], run["end"]) for run in again] == [(run["after"], run["end"]) for run in runs]
    one = Training(tmp_path, WHOLE, shift=1.0, width=WIDE)
    one.load(tmp_path / "checkpoint")
    found = one.train(0, BEFORE, BEFORE + AFTER)
    assert found == continued(tmp_path)[0]
