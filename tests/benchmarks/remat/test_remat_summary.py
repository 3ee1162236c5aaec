"""What README shows of the rematerialization benchmark, and that it can be measured model by model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stowage.flows.benchmarks.remat.names import CHECKPOINTING, EAGER, EVERY_ROOT, MEMORY_BUDGET
from stowage.flows.benchmarks.remat.points import RematJob, run_remat
from stowage.flows.benchmarks.remat.rows import RematRow
from stowage.flows.benchmarks.remat.summary import summary_of
from stowage.stages.ir.errors import MIB, TableError
from stowage.stages.ir.table import read_rows, write_rows

PLAN = RematRow("unet", "auto", "50%", 3 * MIB, 3 * MIB, 1.0, 0.02, 1.0, peak_bytes=3 * MIB, overhead=0.01)
UNET = [
    RematRow("unet", EAGER, "", peak_bytes=8 * MIB, overhead=0.001),
    RematRow("unet", EVERY_ROOT, "", peak_bytes=4 * MIB, overhead=0.5),
    RematRow("unet", MEMORY_BUDGET, "0.1", peak_bytes=5 * MIB, overhead=0.3),
    RematRow("unet", MEMORY_BUDGET, "0.7", peak_bytes=3 * MIB, overhead=0.2),
    PLAN,
    replace(PLAN, setting="65%", peak_bytes=5 * MIB, overhead=-0.014, predicted_overhead=0.004),
    replace(PLAN, setting="30%", note="no plan"),
    replace(PLAN, setting="smallest", peak_bytes=2 * MIB, overhead=0.4, activation_share=0.25),
    replace(PLAN, contestant="rotor", setting="65%", peak_bytes=4 * MIB, overhead=0.1),
    replace(PLAN, contestant="chen_sqrt", setting="smallest", peak_bytes=MIB, overhead=0.6),
]


def test_a_line_a_model_in_each_table() -> None:
    t5 = [RematRow("t5", CHECKPOINTING, "", peak_bytes=2 * MIB, overhead=0.62), RematRow("t5", EAGER, "", note="late")]
    tables = [text.splitlines()[2:] for text in summary_of([*UNET, *t5]).split("\n\n")]
    assert tables == [
        [
            "| U-Net | 8.0 MiB | 4.0 MiB, 50% | **1%** | 3.0–5.0 MiB, 20–30% | **−1 to 1%** |",
            "| T5 |  | (Hugging Face's) 2.0 MiB, 62% |  |  |  |",
        ],
        [
            "| U-Net | **−1%** (0%) | **1%** (2%) | none | 2.0 MiB, 25%, **40%** (2%) |",
            "| T5 | none | none | none | none |",
        ],
        [
            "| U-Net | 10%, **1%** | none | none | none | 1.0 MiB, 60% |",
            "| T5 | none | none | none | none | none |",
        ],
    ]


def test_every_line_has_as_many_cells_as_its_head() -> None:
    for table in summary_of(UNET).split("\n\n"):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_what_was_measured_of_other_models_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "remat.parquet"
    others = [replace(r, activation_share=r.peak_bytes / PLAN.peak_bytes) for r in UNET]
    write_rows(path, RematRow, [*others, replace(PLAN, model="gpt2", overhead=0.7)])
    again = replace(PLAN, model="gpt2", overhead=0.3, activation_share=0.5)
    monkeypatch.setattr("stowage.flows.benchmarks.remat.points.remat_rows", lambda *_: iter([again]))
    run_remat(RematJob(models=("gpt2",)), tmp_path, print)
    points = [(r.model, r.contestant, r.setting, r.overhead) for r in read_rows(path, RematRow)]
    assert points == [(r.model, r.contestant, r.setting, r.overhead) for r in (again, *UNET)], "in the order of titles"
    summary = (tmp_path / "remat_summary.md").read_text()
    assert "| GPT-2 | none | **30%** (2%) |" in summary
    assert "| U-Net | 8.0 MiB |" in summary


def test_a_damaged_file_is_named_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "remat.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("stowage.flows.benchmarks.remat.points.remat_rows", lambda *_: pytest.fail("measured"))
    with pytest.raises(TableError, match=r"remat\.parquet"):
        run_remat(RematJob(models=("gpt2",)), tmp_path, print)
