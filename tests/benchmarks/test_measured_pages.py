"""Measured pages are what their data say, and benchmarks write both."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import polars as pl
import pytest

from stowage.flows.benchmark import application
from stowage.flows.benchmarks.limits.quarter import Quarter
from stowage.flows.benchmarks.pages.measurement import Measurement, measured_now, read_measurement, write_measurement
from stowage.flows.benchmarks.pages.publish import READERS, publish
from stowage.flows.benchmarks.pages.sections import PAGES
from stowage.flows.benchmarks.pages.table import COMMAND
from stowage.flows.benchmarks.pages.write import sections_by_name, with_tables, write_pages
from stowage.flows.benchmarks.remat.rows import RematRow
from stowage.flows.benchmarks.results import command_line
from stowage.stages.ir.errors import MIB, TableError
from stowage.stages.ir.table import write_rows

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measured"


def test_pages_and_readme_are_written_from_the_data(tmp_path: Path) -> None:
    copied = tmp_path / "docs" / "measured"
    shutil.copytree(MEASURED / "data", copied / "data")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(readme, encoding="utf-8")
    written = write_pages(copied)
    assert sorted(p.name for p in MEASURED.glob("*.md")) == sorted(p.name for p in written if p.name != "README.md")
    for path in copied.glob("*.md"):
        assert path.read_text(encoding="utf-8") == (MEASURED / path.name).read_text(encoding="utf-8"), path.name
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme


def test_every_command_line_that_pages_name_is_a_command() -> None:
    named = [read_measurement(path).command for path in (MEASURED / "data").glob("*.json")]
    named += [section.command for page in PAGES for section in page.sections]
    known = {command.name for command in application.registered_commands}
    asked = [line.removeprefix(COMMAND).split() for line in named if line.startswith(COMMAND)]
    assert len(asked) > 10
    assert [words for words in asked if words and words[0] not in known] == []
    assert {name.replace("_", "-") for name in READERS} | {"render"} == known


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["remat", "--rounds", "3", "--write", "docs/measured"], "remat --rounds 3"),
        (["benchmark", "papers", "--write=docs/measured"], "papers"),
        ([], ""),
    ],
)
def test_a_page_says_how_it_is_measured_anew(words: list[str], line: str) -> None:
    assert command_line(words) == f"{COMMAND} {line}".strip()


def test_all_data_is_shown() -> None:
    assert {path.stem for path in (MEASURED / "data").glob("*.json")} <= set(sections_by_name())
    shown = [section.name for page in PAGES for section in page.sections]
    assert len(shown) == len(set(shown))


def test_every_measurement_says_when_and_where() -> None:
    for path in (MEASURED / "data").glob("*.json"):
        m = read_measurement(path)
        assert m.section == path.stem
        assert m.date.startswith("20")
        assert m.machine
        assert m.versions["torch"]
        assert m.rows


def test_a_benchmark_of_the_main_job_becomes_a_page(tmp_path: Path) -> None:
    results, pages = tmp_path / "results", tmp_path / "docs" / "measured"
    results.mkdir()
    plain = {"contestant": "plain PyTorch", "budget_bytes": -1, "peak_bytes": 20 * MIB, "peak_ratio": 1.0}
    plain |= {"time_ratio": 1.0, "plan_s": 0.0, "recomputed_fraction": 0.0, "losses_equal": True}
    plain |= {"predicted_peak_bytes": -1, "predicted_time_s": None}
    plan = {"contestant": "a plan", "budget_bytes": 12 * MIB, "peak_bytes": 10 * MIB, "peak_ratio": 0.5, "plan_s": 12.4}
    plan |= {"time_ratio": 1.115, "recomputed_fraction": 0.5, "losses_equal": False, "predicted_peak_bytes": 10 * MIB}
    (results / "main.json").write_text(json.dumps([plain, plan | {"predicted_time_s": 1.0}]))
    (tmp_path / "README.md").write_text("<!-- benchmark:start -->\nold\n<!-- benchmark:end -->\n")
    publish("main_job", results, pages, "python -m stowage.flows.benchmark main-job --rounds 3")
    page = (pages / "main_job.md").read_text(encoding="utf-8")
    assert "| plain PyTorch |  | 20.0 MiB | 100% | 1.00 |  |  | yes |" in page
    assert "| a plan | 12.0 MiB | 10.0 MiB | 50% | **1.11** | 12 s | 50% | **no** |" in page
    assert "anew: `python -m stowage.flows.benchmark main-job --rounds 3`" in page
    assert "Not measured yet" in page
    assert "| a plan | 12.0 MiB |" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_the_rematerialization_benchmark_becomes_four_tables(tmp_path: Path) -> None:
    plan = RematRow("unet", "auto", "50%", 3 * MIB, 3 * MIB, 1.0, 0.02, 1.0, peak_bytes=3 * MIB, overhead=0.01)
    plain = RematRow("unet", "plain PyTorch", "", peak_bytes=8 * MIB, overhead=0.001)
    write_rows(tmp_path / "remat.parquet", RematRow, [plain, plan, replace(plan, setting="30%", overhead=0.2)])
    found = READERS["remat"](tmp_path)
    assert set(found) == {"remat_peers", "remat_shares", "remat_methods", "remat_accuracy"}
    assert found["remat_shares"] == [
        {"model": "U-Net", "65%": "none", "50%": "**1%** (2%)", "30%": "**20%** (2%)", "smallest": "none"}
    ]
    (accuracy,) = found["remat_accuracy"]
    assert (accuracy["plans"], accuracy["close"]) == (2, 1)


def test_limits_of_the_kernel_become_lines(tmp_path: Path) -> None:
    found = Quarter(
        1, 400 * MIB, 390 * MIB, 100 * MIB, 50 * MIB, 40 * MIB, 90 * MIB, (1.0,), (1.0,), 5.0, 4.0, 3.0, 2.0, "o"
    )
    (tmp_path / "quarter.json").write_text(json.dumps(asdict(found)))
    lines = {row["what"]: (row["plain"], row["plan"]) for row in READERS["quarter"](tmp_path)["quarter"]}
    assert lines["limit under which it survives"] == ("400.0 MiB", "100.0 MiB")
    assert lines["step time, measured"] == ("4.00 s", "5.00 s, 1.25 × plain")
    assert lines["losses"] == ("", "the same")


def test_growth_has_a_line_for_each_depth(tmp_path: Path) -> None:
    rows = {"model": "gpt2", "method": "rockmate", "layers": [8, 8], "stage": ["trace", "total"], "seconds": [1.0, 3.0]}
    pl.DataFrame(rows).write_parquet(tmp_path / "growth.parquet")
    assert READERS["growth"](tmp_path) == {"growth": [{"case": "gpt2, rockmate", "layers": 8, "seconds": 3.0}]}


def test_every_benchmark_has_its_section() -> None:
    assert set(READERS) - {"remat", "elixir", "elixir_plans", "slimfit", "proven"} <= set(sections_by_name())


def test_nan_is_nothing_and_damage_is_a_sentence(tmp_path: Path) -> None:
    write_measurement(tmp_path, measured_now("host", "", [{"ratio": float("nan")}]))
    path = tmp_path / "data" / "host.json"
    assert read_measurement(path).rows == [{"ratio": None}]
    path.write_text('{"section": "host"}')
    with pytest.raises(TableError, match="is no measurement"):
        read_measurement(path)


def test_a_readme_without_marks_stays(tmp_path: Path) -> None:
    write_measurement(tmp_path, Measurement("main_job", "2026-01-01", "here", {}, "", [{"contestant": "a"}]))
    assert with_tables("nothing here\n", tmp_path) == "nothing here\n"
