"""The study of freezing: what its tasks draw, what a trial freezes, and how trials are summarised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stowage.flows.benchmarks.slimfit import trials
from stowage.flows.benchmarks.slimfit.pretraining import pretrained
from stowage.flows.benchmarks.slimfit.study import run_codes, run_study
from stowage.flows.benchmarks.slimfit.summary import PAPER, by_policy, differences, exact, summarised, with_codes
from stowage.flows.benchmarks.slimfit.tasks import TASKS, Task, accuracy
from stowage.flows.benchmarks.slimfit.trials import BASELINE, Trial, run_trial


def short(name: str) -> Task:
    task = TASKS[name]()
    return replace(task, before=replace(task.before, iterations=2), job=replace(task.job, iterations=3))


@pytest.mark.parametrize("name", TASKS)
def test_batches_depend_on_seed_and_iteration_alone(name: str) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    job = TASKS[name]().job
    first, again, other = job.batch(1, 5), job.batch(1, 5), job.batch(2, 5)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["labels"], other["labels"])


def test_a_model_comes_with_the_weights_of_its_pre_training_and_a_head_of_its_seed(tmp_path: Path) -> None:
    task = short("packages")
    first, second = pretrained(task, 1, tmp_path), pretrained(task, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other) != name.startswith("classifier")
    assert 0 <= accuracy(task, first) <= 100


def test_what_a_policy_freezes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = short("packages")
    monkeypatch.setitem(trials.TASKS, "packages", lambda: task)
    before = pretrained(task, 0, tmp_path)
    models = []
    monkeypatch.setattr(trials, "pretrained", lambda *given: models.append(pretrained(*given)) or models[-1])
    found = run_trial(Trial("packages", "prefix", 0.9, 0), tmp_path)
    same = [torch.equal(a, b) for a, b in zip(before.parameters(), models[0].parameters(), strict=True)]
    assert same[0]
    assert not same[-1]
    assert found["active"] == pytest.approx(0.1, abs=0.03)
    assert run_trial(Trial("packages", BASELINE, 0.0, 0), tmp_path)["active"] == 1
    assert not any(torch.equal(a, b) for a, b in zip(before.parameters(), models[1].parameters(), strict=True))


def test_trials_with_codes_are_run_again_where_codes_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has an exact trial beside it, with everything trained and with most of it frozen; those stay."""
    done: list[Trial] = []

    def run(trial: Trial, stores: Path) -> dict[str, object]:
        done.append(trial)
        accuracy = 90.0 - 10 * trial.rate + trial.seed - trial.codes
        return {**trial.key(), "accuracy": accuracy, "predicted_error": 0.01}

    monkeypatch.setattr("stowage.flows.benchmarks.slimfit.study.run_trial", run)
    rows = run_codes(tmp_path, lambda text: None, ["digits"], 2)
    assert [(t.policy, t.rate, t.seed, t.codes) for t in done] == [
        (policy, rate, seed, codes)
        for policy, rate in ((BASELINE, 0.0), ("ils", 0.9))
        for seed in (0, 1)
        for codes in (False, True)
    ]
    table = [(r["task"], r["rate"], r["runs"], r["difference"]) for r in with_codes(rows)]
    assert table == [(task, rate, 2, -1.0) for rate in (0.0, 0.9) for task in ("digits", "all")]
    done.clear()
    assert run_codes(tmp_path, lambda text: None, ["digits"], 2) == rows
    assert done == []
    monkeypatch.setattr(trials, "made_by", lambda: "other codes")
    again = run_codes(tmp_path, lambda text: None, ["digits"], 2)
    assert [t.codes for t in done] == [True] * 4
    assert [row.get("made_by") for row in again] == [None, "other codes"] * 4


def test_a_study_does_not_repeat_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def run(trial: Trial, stores: Path) -> dict[str, object]:
        done.append(trial)
        return {**trial.key(), "accuracy": 90.0 - 10 * trial.rate + trial.seed, "loss": 1.0}

    monkeypatch.setattr("stowage.flows.benchmarks.slimfit.study.run_trial", run)
    rows = run_study(tmp_path, lambda text: None, ["digits"], ["ils", "random"], [0.5], 2)
    assert len(done) == len(rows) == 10  # four of them with codes
    assert run_study(tmp_path, lambda text: None, ["digits"], ["ils", "random"], [0.5], 2) == rows
    assert len(done) == 10
    rows = [row for row in rows if not row.get("codes")]
    (line,) = by_policy(summarised(rows))
    assert (line["everything"], line["ils"]) == ("90.5 ± 0.7", "85.5 ± 0.7")
    assert [(r["policy"], r["difference"], r["error"]) for r in differences(rows)] == [
        ("ils", -5.0, 0.0),
        ("random", -5.0, 0.0),
    ]


def test_ils_as_the_paper_has_it_is_a_policy_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(trial: Trial, stores: Path) -> dict[str, object]:
        return {**trial.key(), "accuracy": 90.0 - (trial.units == "parameter"), "loss": 1.0}

    monkeypatch.setattr("stowage.flows.benchmarks.slimfit.study.run_trial", run)
    rows = exact(run_study(tmp_path, lambda text: None, ["digits"], ["ils"], [0.5, 0.9], 2))
    assert [(r["policy"], r["rate"], r["difference"]) for r in differences(rows)] == [
        ("ils", 0.5, 0.0),
        ("ils", 0.9, 0.0),
        (PAPER, 0.9, -1.0),
    ]
    assert [line.get(PAPER) for line in by_policy(summarised(rows))] == [None, "89.0 ± 0.0"]
    (paper,) = {(r["units"], r["distance"]) for r in rows if r["policy"] == PAPER}
    assert paper == ("parameter", "relative")
