"""The benchmark of how far plans are from the optimum: cells, what is kept of them, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stowage.flows.benchmarks.pages.measurement import measured_now, write_measurement
from stowage.flows.benchmarks.pages.write import page_text
from stowage.flows.benchmarks.proven import run as proven
from stowage.flows.benchmarks.proven.others import MeasuredPoint, measured_points
from stowage.flows.benchmarks.proven.pages import PAGE, sections_of
from stowage.stages.ir.errors import MIB, ParameterError


def _pages(folder: Path) -> Path:
    """A folder of pages in which somebody else's points of the U-Net were measured."""
    row = {"model": "U-Net", "checkpoint": "0.3 MiB, 43%", "memory_budget": "0.4–0.5 MiB, −2–31%"}
    write_measurement(folder, measured_now("remat_peers", "by hand", [row]))
    return folder


def test_points_of_others_are_read_from_the_page_of_the_remat_benchmark(tmp_path: Path) -> None:
    assert measured_points(tmp_path) == {}
    assert measured_points(_pages(tmp_path))["U-Net"] == [
        MeasuredPoint("torch.utils.checkpoint", int(0.3 * MIB), 0.43),
        MeasuredPoint("activation_memory_budget", int(0.4 * MIB), 0.31),
        MeasuredPoint("activation_memory_budget", int(0.5 * MIB), -0.02),
    ]


def test_points_of_the_main_job_are_its_own_benchmarks(tmp_path: Path) -> None:
    rows = [
        {"contestant": "plain PyTorch", "peak_bytes": 9, "time_ratio": 1.0},
        {"contestant": "gradient checkpointing", "peak_bytes": 5, "time_ratio": 1.25},
        {"contestant": "activation_memory_budget 0.5", "peak_bytes": 7, "time_ratio": 1.5},
        {"contestant": "Stowage at 50%", "peak_bytes": 4, "time_ratio": 1.125},
    ]
    write_measurement(tmp_path, measured_now("main_job", "by hand", rows))
    assert measured_points(tmp_path) == {
        "main job": [
            MeasuredPoint("torch.utils.checkpoint", 5, 0.25),
            MeasuredPoint("activation_memory_budget", 7, 0.5),
        ]
    }


@pytest.mark.long
def test_cells_are_kept_one_by_one_and_make_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, pages = tmp_path / "out", _pages(tmp_path / "measured")
    said: list[str] = []
    proven.run_proven(out, pages, said.append, "unet", "50%", size="tiny")
    assert any(line.startswith("U-Net, 50%, Stowage: 1.0") for line in said)
    first = (out / "proven" / "unet-50.json").read_text()
    proven.run_proven(out, pages, said.append, "unet", "smallest,measured,planning,eviction", size="tiny")
    cells = proven.kept_cells(out)
    assert {c["budget"] for c in cells} >= {"50%", "smallest"}
    for cell in cells:
        if cell["budget_bytes"] > 0 and cell["status"] != "measured":
            assert cell["time_s"] >= cell["bound_s"] > 0
            assert cell["over_bound"] == pytest.approx(cell["time_s"] / cell["bound_s"])
            ours = cell["who"] == "Stowage" and (cell["budget"] == "smallest" or cell["budget"].endswith("%"))
            assert (cell["seconds"] > 0) == ours, "proving is timed by itself, of plans that are made now"
            assert cell["fit_over_bound"] >= 1 if ours else cell["fit_over_bound"] == 0

    def fail(*_: object) -> None:
        raise AssertionError("measured what is there already")

    monkeypatch.setattr(proven, "ProvenCase", fail)
    proven.run_proven(out, pages, said.append, "unet", "50%,smallest,measured,planning,eviction")
    assert (out / "proven" / "unet-50.json").read_text() == first
    (row,) = proven.kept_planning(out)
    assert row["model"] == "U-Net"
    assert 0 < row["without_s"] <= 60 * row["with_s"]
    assert 0 < row["quick_without_s"] <= 60 * row["quick_with_s"]
    share, without, with_it = proven.kept_eviction(out)
    assert (without["budget"], with_it["budget"]) == ("smallest without", "smallest with")
    assert with_it["budget_bytes"] <= without["budget_bytes"]
    for each in (share, without, with_it):
        assert each["without_s"] is None or each["with_s"] <= each["without_s"] * (1 + 1e-9)
    for name, rows in sections_of(cells, proven.kept_planning(out), proven.kept_eviction(out)).items():
        assert rows
        write_measurement(pages, measured_now(name, "python -m stowage.flows.benchmark proven", rows))
    text = page_text(PAGE, pages)
    assert "U-Net" in text
    assert "not measured" not in text.lower()


def test_a_budget_that_nothing_fits_is_a_row_without_numbers(tmp_path: Path) -> None:
    (tmp_path / "proven").mkdir()
    cell = {"model": "LSTM", "budget": "30%", "who": "Stowage", "budget_bytes": -1, "status": "none fits"}
    numbers = {"time_s": 0.0, "bound_s": 0.0, "over_bound": 0.0, "cuts": 0, "seconds": 0.0}
    (tmp_path / "proven" / "lstm-30.json").write_text(json.dumps([cell | numbers]))
    (row,) = sections_of(proven.kept_cells(tmp_path))["proven_ours"]
    assert row["status"] == "none fits"
    assert row["over_bound"] is None


def test_old_rows_lack_what_was_not_measured_then_and_new_ones_have_ratios(tmp_path: Path) -> None:
    """Columns that no row has a value of are left out, and a plan that does not fit has no ratio."""
    old = {"model": "LSTM", "without_s": 2.0, "with_s": 3.0}
    new = old | {"model": "U-Net", "quick_without_s": 1.0, "quick_with_s": 0.9}
    fits = {"model": "U-Net", "budget": "30%", "budget_bytes": 1 << 20, "without_s": 2.0, "with_s": 1.0}
    lean = fits | {"budget": "smallest with", "without_s": None}
    sections = sections_of([], [old, new], [fits, lean])
    assert [row.get("quick_ratio") for row in sections["proven_planning"]] == [None, 0.9]
    assert [row["ratio"] for row in sections["proven_eviction"]] == [0.5, None]
    write_measurement(
        tmp_path, measured_now("proven_planning", "by hand", [sections_of([], [old])["proven_planning"][0]])
    )
    assert "quick, with" not in page_text(PAGE, tmp_path)
    write_measurement(tmp_path, measured_now("proven_planning", "by hand", sections["proven_planning"]))
    assert "quick, with" in page_text(PAGE, tmp_path)


@pytest.mark.parametrize(("models", "budgets", "word"), [("vgg", "", "vgg"), ("unet", "10%", "10%")])
def test_a_name_that_nobody_knows_is_one_sentence(tmp_path: Path, models: str, budgets: str, word: str) -> None:
    with pytest.raises(ParameterError, match=word):
        proven.run_proven(tmp_path, tmp_path, print, models, budgets)
