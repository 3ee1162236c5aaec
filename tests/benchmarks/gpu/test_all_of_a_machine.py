"""Without a step, `gpu` does all that the machine can do: what needs several cards where there are several."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from stowage.flows import gpu


@pytest.mark.parametrize(("cards", "expected"), [(1, ["plan", "race"]), (2, ["plan", "race", "ranks"])])
def test_several_cards_train_one_model_too(
    cards: int, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    asked: list[argparse.Namespace] = []

    def ranks(given: argparse.Namespace) -> int:
        done.append("ranks")
        asked.append(given)
        return 3

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(gpu, "measure_job", lambda *_, **__: None)
    monkeypatch.setattr(gpu, "plan", lambda given: done.append("plan"))
    monkeypatch.setattr(gpu, "race", lambda *_, **__: done.append("race") or [])
    monkeypatch.setattr(gpu, "carried_job", lambda path: None)
    monkeypatch.setattr(gpu, "notes_of", lambda job, rows: [])
    monkeypatch.setattr(gpu, "text_of", lambda rows: "")
    monkeypatch.setattr(gpu, "run_all_ranks", ranks)
    words = ["--no-tests", "--dtype", "float32", "--set", "num_hidden_layers=1", "--batch", "1", "--steps", "2"]
    status = gpu.main([*words, "--out", str(tmp_path)])
    assert done == expected
    assert status == (3 if cards > 1 else 0)
    for given in asked:
        assert (given.set, given.batch, given.steps, given.out) == ([], None, 2, tmp_path)
