"""The report: complete, self-contained, the same bytes for the same input, and right about what it counts."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stowage.stages.ir.graph import SHARED
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.run import TraceSpan
from stowage.stages.ir.spans import predicted_spans
from stowage.stages.report import ReportTables, summary_table, write_report
from stowage.stages.report.activations import block_fates, forward_results, totals, treatments
from stowage.stages.report.curves import measured, predicted, spans, thin, turns
from stowage.stages.report.facts import gather, headline, verdict
from stowage.stages.report.units import byte_unit, number, percent, ranges, ratio, seconds, size
from tests.report.synthetic import MIB, Tables, synthetic

PLOTS = ("memory", "timeline", "blocks", "loss")


@pytest.fixture(scope="module")
def tables() -> Tables:
    return synthetic()


def _write(folder: Path, tables: Tables, **changes: Any) -> Path:
    return write_report(folder, ReportTables(**{**vars(tables), **changes}))


class _Tags(HTMLParser):
    """Fails on a tag that is not closed in order; collects attributes that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.loads += [
            v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith(("#", "data:"))
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_self_contained_and_well_formed(tables: Tables, tmp_path: Path) -> None:
    page = _write(tmp_path, tables, paths={"plan": "solve/plan.parquet", "step.py": Path("codegen") / "step.py"})
    text = page.read_text()
    parser = _Tags()
    parser.feed(text)
    assert parser.open == []
    assert parser.loads == []
    assert not parser.tags & {"script", "link", "iframe", "img", "object"}
    assert "@import" not in text
    assert text.count("<svg ") == 4
    assert len(text) < 1_000_000
    for wanted in ("solve/plan.parquet", "codegen/step.py", "0f3c5a77e2d94b1886aa", "OR-Tools CP-SAT", "Device budget"):
        assert wanted in text
    for name in PLOTS:
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_predicted_and_measured_side_by_side(tables: Tables, tmp_path: Path) -> None:
    predicted_ones = predicted_spans(tables.plan_rows, tables.nodes)
    slower = [replace(s, series="measured", start_s=1.1 * s.start_s, end_s=1.1 * s.end_s) for s in predicted_ones]
    wait = TraceSpan("measured", "wait", "wait for h.0.weight", 0, 0.1, 0.2)
    copy = TraceSpan("measured", "reload", "h.0.weight", MIB, -0.1, 0.2)
    text = _write(tmp_path, tables, streams=[*predicted_ones, *slower, wait, copy]).read_text()
    parser = _Tags()
    parser.feed(text)
    assert parser.open == []
    assert text.count("<svg ") == 5
    assert "1.10 ×" in text
    assert "copies up" in text
    assert "copies down" not in text
    steps = [s.name for s in predicted_ones if s.stream == "compute"]
    assert f"Time of each of the {len(steps)} steps" in text
    assert (tmp_path / "plots" / "streams.png").read_bytes().startswith(b"\x89PNG")


def test_equal_input_equal_files(tables: Tables, tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        _write(tmp_path, tables)
        contents.append({p.name: p.read_bytes() for p in sorted(tmp_path.rglob("*.*")) if p.is_file()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {"report.html", "loss.csv", "memory.csv", *(f"{name}.png" for name in PLOTS)}


def test_before_training_and_without_options(tables: Tables, tmp_path: Path) -> None:
    text = _write(tmp_path, tables, steps=[], memory=[], options=[]).read_text()
    assert "No iteration has run yet" in text
    assert "predicted peak is" in text
    assert "not measured" in text
    assert "options considered" not in text


def test_text_from_tables_is_escaped(tables: Tables, tmp_path: Path) -> None:
    assert tables.summary is not None
    hostile = replace(tables.summary, device="<script>alert(1)</script>", solver="a & b")
    text = _write(tmp_path, tables, summary=hostile, title="x < y").read_text()
    assert "<script>" not in text
    assert "a &amp; b" in text
    assert "x &lt; y" in text


def test_many_blocks_stay_small(tmp_path: Path) -> None:
    text = _write(tmp_path, synthetic(72, 30, 24, steps=300)).read_text()
    assert len(text) < 1_000_000
    assert "276 more iterations" in text


def test_fates_follow_the_rows(tables: Tables) -> None:
    results = {r.name: r for r in forward_results(tables.storages, tables.nodes, tables.plan_rows)}
    assert results["h.0.gelu"].fate == "recomputed", "block 0 is fast-forwarded"
    assert results["h.5.gelu"].fate == "recomputed", "block 5 recomputes what is cheap"
    assert results["h.5.qkv"].fate == "kept"
    assert results["h.11.gelu"].fate == "kept"
    assert results["h.0.proj"].fate == "dropped", "no backward node reads it, though it is made twice"
    assert results["positions"].block == SHARED
    assert "h.0.gelu.gradient" not in results


def test_every_forward_byte_is_counted_once(tables: Tables) -> None:
    fates = block_fates(tables.storages, tables.nodes, tables.blocks, tables.plan_rows)
    made = {s for n in tables.nodes if n.phase == "forward" for s in n.creates}
    assert sum(totals(fates).values()) == sum(tables.storages[s].nbytes for s in made)
    recompute = sum(r.end_s - r.start_s for r in tables.plan_rows if r.action == "compute" and r.recompute)
    assert math.isclose(sum(b.recompute_s for b in fates), recompute)


def test_identical_blocks_share_a_row_when_treated_alike(tables: Tables) -> None:
    groups = treatments(block_fates(tables.storages, tables.nodes, tables.blocks, tables.plan_rows))
    assert [g.numbers for g in groups] == [[SHARED], [0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10], [11]]


def test_curves_keep_the_peak(tables: Tables) -> None:
    assert tables.summary is not None
    assert predicted(tables.plan_rows).peak[1] == tables.summary.device_peak_bytes
    points = [(i * 0.001, (i * 7919) % 100_003) for i in range(50_000)]
    curve = thin(points)
    assert len(curve.times_s) <= 4 * 1200 + 4
    assert max(curve.nbytes) == max(b for _, b in points)
    assert min(curve.nbytes) == min(b for _, b in points)
    assert list(curve.times_s) == sorted(curve.times_s)
    assert measured(tables.memory, "nothing") == thin([])


def test_spans_cover_the_compute_time(tables: Tables) -> None:
    found = spans(tables.plan_rows, tables.nodes)
    assert tables.summary is not None
    assert math.isclose(sum(s.end_s - s.start_s for s in found), tables.summary.step_time_s)
    assert {s.kind for s in found} == {"forward", "recompute", "backward", "update"}
    assert len(turns(found)) == 2 * len(tables.blocks) + 1


def test_facts_leave_out_what_the_profiler_slowed(tables: Tables) -> None:
    slow = [replace(s, time_s=100.0) if s.peak_bytes >= 0 else s for s in tables.steps]
    facts = gather(slow, tables.memory)
    assert facts.step_s is not None
    assert facts.step_s < 10
    assert facts.peak_bytes == max(
        [s.peak_bytes for s in slow] + [m.resident_bytes for m in tables.memory if m.series == "measured"]
    )
    assert facts.equal == facts.compared == len(slow)
    off = [*slow[:-1], replace(slow[-1], loss=slow[-1].loss + 0.5)]
    assert "9 of 10" in verdict(gather(off))
    assert "0.5" in verdict(gather(off))
    alone = gather([replace(s, eager_loss=math.nan, eager_time_s=math.nan) for s in slow])
    assert alone.eager_step_s is None
    assert "not compared" in verdict(alone)


def test_budget_that_was_exceeded_is_said(tables: Tables, tmp_path: Path) -> None:
    assert tables.summary is not None
    tight = replace(tables.summary, device_budget_bytes=tables.summary.device_peak_bytes - 64 * MIB)
    assert "exceeded by" in headline(tight, gather(tables.steps, tables.memory))[0].note
    assert "does not fit the budget" in _write(tmp_path, tables, summary=tight).read_text()


def test_summary_table_shows_every_headline_number(tables: Tables) -> None:
    assert tables.summary is not None
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(summary_table(tables.summary, tables.steps, tables.memory))
    text = console.export_text()
    for label in ("Device budget", "Predicted peak", "Measured peak", "Predicted step time", "Measured step time"):
        assert label in text
    assert len(re.findall(r"Loss, step \d+ .* equal ", text)) == 10
    differs = [replace(tables.steps[0], eager_loss=0.0), *[replace(tables.steps[1], iteration=i) for i in range(1, 40)]]
    console.print(summary_table(tables.summary, differs))
    text = console.export_text()
    assert "differs" in text
    assert "24 more steps" in text


def test_units() -> None:
    assert [size(b) for b in (None, 0, 2048, 5 * MIB, 20 << 30)] == ["–", "0.0 MiB", "2.0 KiB", "5.0 MiB", "20.00 GiB"]
    assert byte_unit([3 * MIB])[1] == "MiB"
    assert [seconds(s) for s in (None, math.nan, 1.5, 0.0123, 4.2e-6)] == ["–", "–", "1.5 s", "12.3 ms", "4.2 µs"]
    assert ranges([3, 0, 1, 2, 7]) == "0–3, 7"
    assert ratio(1.0, None) is None
    assert percent(0.0315) == "3.1%"
    assert number(math.nan) == "–"


def test_an_empty_plan_still_makes_a_page(tables: Tables, tmp_path: Path) -> None:
    rows: list[PlanRow] = []
    assert _write(tmp_path, Tables(summary=tables.summary), plan_rows=rows).is_file()


def test_needs_no_torch() -> None:
    code = "import sys, stowage.stages.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
