"""What the report says besides: modules, slow iterations, step time against budget; and its curves as data for DVC."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import yaml

from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.trace import Call
from stowage.stages.report import ReportTables, write_report
from stowage.stages.report.data import SHARES, loss_frame, memory_frame, write_curves
from stowage.stages.report.facts import slow
from stowage.stages.report.modules import module_of_block, module_of_peak, modules_of
from tests.report.synthetic import MIB, Tables, synthetic

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> Tables:
    return synthetic()


def _step(iteration: int, time_s: float, peak_bytes: int = -1) -> StepRecord:
    return StepRecord(iteration, 1.0, float("nan"), 1e-3, time_s, float("nan"), peak_bytes)


def test_slow_iterations_are_told_from_noise_and_from_the_first() -> None:
    times = [9.0, 3.0, 2.0, *(1.0 + 0.01 * (k % 3) for k in range(20)), 1.1, 1.5, 4.0]
    steps = [_step(k, t) for k, t in enumerate(times)]
    assert [s.iteration for s in slow(steps)] == [24, 25]
    assert slow([replace(s, peak_bytes=5) if s.iteration == 25 else s for s in steps])[-1].iteration == 24
    assert slow(steps[:4]) == [], "too few to tell"


def test_slow_iterations_are_marked(tables: Tables, tmp_path: Path) -> None:
    steps = [_step(k, 10.0 if k == 30 else 1.0) for k in range(60)]
    text = write_report(tmp_path, ReportTables(**{**vars(tables), "steps": steps})).read_text()
    assert "Slow iterations" in text
    assert "30 (10 s)" in text
    assert (
        "Slow iterations"
        not in write_report(tmp_path, ReportTables(**{**vars(tables), "steps": steps[:30]})).read_text()
    )


def _call(number: int, module: str) -> Call:
    return Call(number, "aten.add.Tensor", "[]", (), (), False, (), False, False, "", "forward", module, "", "x")


def test_modules_are_named(tables: Tables, tmp_path: Path) -> None:
    count = 1 + max(c for n in tables.nodes for c in n.calls)
    calls = [_call(k, "") for k in range(count)]
    for node in tables.nodes:
        for call in node.calls:
            calls[call] = _call(call, f"net.h.{node.block}.{node.name.split('.')[-1]}" if node.block >= 0 else "")
    text = write_report(tmp_path, ReportTables(**{**vars(tables), "calls": calls})).read_text()
    assert "net.h.0, …, net.h.4" in text, "blocks that are treated alike"
    assert "<code>net.h.0.gelu</code>" in text
    nodes = {n.node: n for n in tables.nodes}
    modules = modules_of(tables.nodes, calls)
    at = module_of_peak(tables.plan_rows, nodes, modules)
    assert f"<code>{at}</code>" in text
    peak = max(tables.plan_rows, key=lambda r: r.peak_bytes)
    assert at == f"{modules[peak.node]}, {nodes[peak.node].phase}"


def test_a_block_is_the_innermost_module_that_has_all_of_it(tables: Tables) -> None:
    block, nodes = tables.blocks[0], {n.node: n for n in tables.nodes}
    forward = [n for n in block.nodes if nodes[n].phase == "forward"]

    def named(first: str, others: str) -> str:
        return module_of_block(block, nodes, {n: first if n == forward[0] else others for n in forward})

    assert named("h.1.mlp", "h.1.mlp") == "h.1.mlp"
    assert named("h.1.mlp.act", "h.1.attn") == "h.1"
    assert named("h.1", "h.10.act") == "h"
    assert named("wte", "h.0") == "wte … h.0"


def _points() -> list[CurvePoint]:
    return [
        CurvePoint(900 * MIB, True, 890 * MIB, 6.0, 0.0, smallest_feasible_bytes=400 * MIB, method="keep_all"),
        CurvePoint(600 * MIB, True, 590 * MIB, 6.6, 0.1, smallest_feasible_bytes=400 * MIB, method="rockmate"),
        CurvePoint(400 * MIB, True, 400 * MIB, 12.0, 1.0, smallest_feasible_bytes=400 * MIB, method="rockmate"),
        CurvePoint(300 * MIB, False, smallest_feasible_bytes=400 * MIB),
    ]


def test_the_curve_has_a_section_where_there_is_one(tables: Tables, tmp_path: Path) -> None:
    text = write_report(tmp_path, ReportTables(**{**vars(tables), "curve": _points()})).read_text()
    assert "Step time against budget" in text
    assert (tmp_path / "plots" / "curve.png").read_bytes().startswith(b"\x89PNG")
    other = write_report(tmp_path / "other", ReportTables(**{**vars(tables), "curve": _points()[3:]})).read_text()
    assert "Step time against budget" not in other, "no budget has a plan"


def test_tables_of_curves_have_what_the_pictures_show(tables: Tables) -> None:
    frame = memory_frame(tables.plan_rows, tables.memory)
    assert frame.height == SHARES + 1
    assert frame["share_percent"].to_list()[:: SHARES // 2] == [0.0, 50.0, 100.0]
    assert tables.summary is not None
    highest = frame.select(pl.col("predicted").max()).item()
    assert highest == pytest.approx(tables.summary.device_peak_bytes / MIB, abs=1e-3)
    assert memory_frame(tables.plan_rows, [])["measured"].null_count() == SHARES + 1
    losses = loss_frame(tables.steps)
    assert losses["loss"].to_list() == [s.loss for s in tables.steps]
    assert loss_frame([_step(0, 1.0)])["plain_loss"].to_list() == [None]


def _dvc(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_dvc_lays_the_curves_of_two_revisions_over_each_other(tables: Tables, tmp_path: Path) -> None:
    """With the `plots` of this repository's `dvc.yaml`; the second revision has no measurement beside its plan."""
    plots = yaml.safe_load((ROOT / "dvc.yaml").read_text())["plots"]
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"plots": plots}))
    _git(tmp_path, "init", "-q")
    _dvc(tmp_path, "init", "-q")
    folder = tmp_path / "artifacts" / "train" / "curves"
    for name, factor in (("first", 1.0), ("second", 2.0)):
        steps = [replace(s, loss=s.loss * factor) for s in tables.steps]
        write_curves(folder, tables.plan_rows, tables.memory if factor == 1.0 else [], steps)
        _git(tmp_path, "add", ".")
        _git(tmp_path, "commit", "-q", "-m", name)
    said = json.loads(_dvc(tmp_path, "plots", "diff", "HEAD~1", "HEAD", "--json"))
    assert not said.get("errors"), said.get("errors")
    data = said["data"]
    assert set(data) == {"loss", "step_time", "memory"}
    for name, entries in data.items():
        revisions = {revision for entry in entries for revision in entry["revisions"]}
        assert revisions == {"HEAD~1", "HEAD"}, name
        content = json.dumps(entries)
        assert "HEAD~1" in content
    page = _dvc(tmp_path, "plots", "diff", "HEAD~1", "HEAD", "-o", "page")
    assert "index.html" in page


def test_nodes_without_modules_name_none() -> None:
    assert modules_of([], []) == {}
    assert module_of_peak([], dict[int, ComputeNode](), {0: "x"}) == ""
