"""The parts of `benchmark slimfit`: which there are, what is kept of earlier runs, and how rows become lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stowage.flows.benchmarks.pages.publish import READERS
from stowage.flows.benchmarks.pages.write import sections_by_name
from stowage.flows.benchmarks.slimfit import run
from stowage.flows.benchmarks.slimfit.lossy_plans import EXACT, LOSSY, LossyRow
from stowage.flows.benchmarks.slimfit.models import MODELS
from stowage.flows.benchmarks.slimfit.saved import Saved
from stowage.stages.ir.errors import ParameterError


def rows_of(out: Path, section: str) -> Any:
    return json.loads((out / run.FILE).read_text())[section]


def test_a_part_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="no part 'speed' in this benchmark: write some of accuracy, codes, saved"):
        run.run_parts(tmp_path, print, "saved,speed")


def test_a_model_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="no task, model or technique 'vitt' in this benchmark"):
        run.run_parts(tmp_path, print, "saved", "vitt")


def test_only_what_a_run_has_measured_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before keeps its date and its command."""
    monkeypatch.setattr(run, "compare_lossy", lambda *given, **more: [])
    monkeypatch.setattr(run, "saved_activations", lambda model: [])
    run.run_parts(tmp_path, lambda text: None, "lossy", "vit")
    assert set(READERS["slimfit"](tmp_path)) == {"slimfit_lossy"}
    run.run_parts(tmp_path, lambda text: None, "saved,lossy", "bert")
    assert set(READERS["slimfit"](tmp_path)) == {"slimfit_lossy", "slimfit_saved"}
    run.run_parts(tmp_path, lambda text: None, "saved,lossy", "decoder")
    assert set(READERS["slimfit"](tmp_path)) == {"slimfit_saved"}, "a part without a model of that name is left out"


def test_models_measured_before_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def saved(model: Any) -> Iterator[Saved]:
        yield Saved(model.label, "4 of saving", 0.5, "worst", 100, 101, 0.2)

    monkeypatch.setattr(run, "saved_activations", saved)
    first, second = list(MODELS)[:2]
    for names in (first, f"{first},{second}"):
        run.run_parts(tmp_path, lambda text: None, "saved", names)
    assert [row["model"] for row in rows_of(tmp_path, "slimfit_saved")] == [MODELS[first].label, MODELS[second].label]
    assert rows_of(tmp_path, "slimfit_saved")[0]["batch"] == MODELS[first].batch


def test_a_plan_with_leave_states_its_error_and_one_that_does_not_fit_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        LossyRow("vit", 0.5, 10, EXACT, True, 0.2, 0.3, 9, 9),
        LossyRow("vit", 0.5, 10, LOSSY, True, 0.1, 0.2, 9, 9, 0.01, 0.009, ("int8 of GELU's input",)),
        LossyRow("vit", 0.15, 3, EXACT, False),
        LossyRow("vit", 0.3, 8, LOSSY, True, 0.2, 0.3, 9, 9, same=True),
    ]
    monkeypatch.setattr(run, "compare_lossy", lambda *given, **more: found)
    run.run_parts(tmp_path, lambda text: None, "lossy", "vit")
    exact, lossy, none, same = rows_of(tmp_path, "slimfit_lossy")
    assert (exact["leave"], "error" in exact) == ("exact", False)
    assert (lossy["leave"], lossy["error"], lossy["kept"]) == ("with leave", 0.009, "int8 of GELU's input")
    assert none["leave"] == "exact: none fits"
    assert (same["same"], same["time_s"]) == (True, None), "noise is not compared"
    for row in (exact, lossy, none, same):
        for column in sections_by_name()["slimfit_lossy"].columns:
            if row.get(column.key):
                assert column.write(row[column.key])
