"""The command for a machine with a GPU, on the CPU: what it would do there, with a tiny model.

Measuring and every contestant run where only torch, transformers, pyarrow and safetensors are installed.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings

from stowage.flows import _gpu_race, gpu
from stowage.flows._gpu_carried import MEASURED, PLANNED, pack, unpack
from stowage.flows._gpu_contestant import Result
from stowage.flows._gpu_measure import fitting_dtype
from stowage.flows._gpu_race import CHROME_TRACE, FEW, PEERS, TABLE
from stowage.flows._gpu_table import EXTRAPOLATED, REFERENCE, GpuRow, extrapolate, rows_of, text_of
from stowage.flows._project import import_path, stage_environment
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.table import read_record, read_rows
from tests.matrix import THOROUGH

ROOT = Path(__file__).parents[2]
ALONE = str(Path(__file__).with_name("alone.py"))
MODEL = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
JOB = [
    *("--device", "cpu", "--no-tests", "--quick", "--dtype", "float32", "--batch", "1", "--length", "16"),
    *("--limit-gb", "0.03", "--host-gb", "1", "--steps", "1", "--fraction", "0.95", "--method", "offmate"),
    *(word for key, value in MODEL.items() for word in ("--set", f"{key}={value}")),
]


PEERS_OF_SOME = ("FSDP2, CPUOffloadPolicy",)
SOME = ("Stowage", REFERENCE, *PEERS_OF_SOME)
"""Contestants of a short run; a thorough one has all."""


def is_thorough() -> bool:
    """Whether this run takes its time."""
    return settings().max_examples >= THOROUGH


def alone(*words: str) -> subprocess.CompletedProcess[str]:
    """A module in a process of its own, with little installed."""
    command = [sys.executable, ALONE, *words]
    return subprocess.run(command, cwd=ROOT, env=stage_environment(ROOT), capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after all three steps."""
    folder = tmp_path_factory.mktemp("gpu")
    measured = alone("stowage.flows.gpu", "measure", *JOB, "--out", str(folder))
    assert measured.returncode == 0, measured.stderr
    home = ["--home", str(folder / "home")]
    assert gpu.main(["plan", *JOB, *home, "--out", str(folder)]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gpu_race, "CONTESTANT", (sys.executable, ALONE, "stowage.flows._gpu_contestant"))
        patch.setenv("PYTHONPATH", str(import_path(ROOT)))
        only = [] if is_thorough() else [word for name in SOME for word in ("--only", name)]
        assert gpu.main(["train", *JOB, *only, "--out", str(folder)]) == 0
    return folder


def test_what_is_hidden_is_hidden() -> None:
    hidden = alone("json.tool", "--help").stdout.splitlines()[0].removeprefix("hidden: ").split(",")
    assert {"pydantic", "rich", "typer", "polars", "prefect", "dvc", "pulp", "ortools", "platformdirs"} <= {*hidden}
    assert not {"torch", "transformers", "pyarrow", "safetensors", "stowage"}.intersection(hidden)
    assert "No module named" in alone("stowage.stages.settings").stderr


def test_the_plan_keeps_the_limit_and_offloads(out: Path, tmp_path: Path) -> None:
    unpack(out / PLANNED, tmp_path)
    summary = read_record(tmp_path / "plans" / "0.950" / "summary.json", PlanSummary)
    assert summary.device_budget_bytes == int(0.95 * 0.03e9)
    assert summary.offload_bytes > 0
    assert summary.estimated_nodes == 0


def test_everyone_is_in_the_table(out: Path) -> None:
    rows = {row.contestant: row for row in read_rows(out / TABLE, GpuRow)}
    few = [f"plain PyTorch, {layers} layers" for layers in FEW]
    everyone = ["Stowage at 95%", REFERENCE, *few, *PEERS, EXTRAPOLATED]
    assert list(rows) == (everyone if is_thorough() else ["Stowage at 95%", REFERENCE, *PEERS_OF_SOME])
    ours, plain = rows["Stowage at 95%"], rows[REFERENCE]
    assert ours.losses_equal
    assert len(ours.losses) == 3
    assert len(set(ours.losses)) == 3
    assert 0 < ours.peak_bytes <= 0.95 * 0.03e9
    assert ours.predicted_peak_bytes <= 0.95 * 0.03e9
    assert plain.peak_bytes > 0.03e9, "the limit would not limit"
    for name in rows.keys() & {"gradient checkpointing, optimizer in host memory", *PEERS_OF_SOME}:
        assert rows[name].note == "", name
        assert rows[name].time_s > 0
        assert rows[name].worst_loss_difference < 1e-5
    for name in (n for n in rows if "DeepSpeed" in n):
        assert rows[name].time_s > 0 or "deepspeed" in rows[name].note
    if is_thorough():
        assert rows[EXTRAPOLATED].peak_bytes == pytest.approx(plain.peak_bytes, rel=0.05)
    assert "Stowage at 95%" in text_of([*rows.values()])


def test_the_traced_iteration_has_copies_and_steps(out: Path) -> None:
    events = json.loads((out / CHROME_TRACE).read_text())["traceEvents"]
    measured = {e["cat"] for e in events if e["ph"] == "X" and e["pid"] == 2}
    assert {"compute", "offload", "reload", "update"} <= measured


def test_what_is_carried_is_small(out: Path) -> None:
    assert (out / MEASURED).stat().st_size < 1 << 20
    assert (out / PLANNED).stat().st_size < 1 << 20


def test_carried_files_come_back(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.txt").write_text("x")
    pack(tmp_path / "packed", tmp_path / "a")
    unpack(tmp_path / "packed", tmp_path / "d")
    assert (tmp_path / "d" / "b" / "c.txt").read_text() == "x"
    (tmp_path / "packed").write_bytes((tmp_path / "packed").read_bytes()[:40])
    with pytest.raises(TableError, match="is damaged"):
        unpack(tmp_path / "packed", tmp_path / "e")
    with pytest.raises(TableError, match="is missing: run the step before"):
        unpack(tmp_path / "nothing", tmp_path / "e")


def test_a_carried_file_stays_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("x")
    with tarfile.open(tmp_path / "packed", mode="w:gz") as archive:
        archive.add(tmp_path / "outside.txt", "../outside.txt")
    (tmp_path / "outside.txt").unlink()
    with pytest.raises(TableError, match=r"\.\./outside\.txt, which is no file of its folder"):
        unpack(tmp_path / "packed", tmp_path / "a")
    assert not (tmp_path / "outside.txt").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["measure", "--device", "cpu", "--set", "layers"], "--set layers is not key=number"),
        (["plan", "--out", "nowhere"], "measured.tar.gz is missing"),
        (["train", "--out", "nowhere"], "planned.tar.gz is missing"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(words) == 1
    assert sentence in capsys.readouterr().err


def test_the_type_follows_the_host_memory() -> None:
    assert fitting_dtype(1_000, 20_800) == "float32"
    assert fitting_dtype(1_000, 20_799) == "bfloat16"


def test_layers_are_extrapolated_along_a_line() -> None:
    two, four = Result("", times_s=(1.0, 3.0, 2.0), peak_bytes=100), Result("", times_s=(3.0,), peak_bytes=160)
    whole = extrapolate(2, two, 4, four, 32)
    assert whole is not None
    assert whole.time_s == pytest.approx(2.0 + 0.5 * 30)
    assert whole.peak_bytes == 100 + 30 * 30
    assert extrapolate(2, two, 4, Result("does not fit"), 32) is None


def test_rows_compare_with_the_best_reference() -> None:
    ours = Result("", losses=(2.0, 1.0), times_s=(3.0,))
    plain = Result("", losses=(2.0, 1.001), times_s=(2.0,))
    line = Result("", times_s=(1.5,))
    row = rows_of({"ours": ours, REFERENCE: plain, EXTRAPOLATED: line}, 10, {EXTRAPOLATED: "so"})[0]
    assert (row.time_ratio, row.losses_equal, row.limit_bytes) == (1.5, False, 10)
    assert row.worst_loss_difference == pytest.approx(0.001 / 1.001)
    unfit = replace(plain, note="does not fit", losses=(), times_s=())
    rows = rows_of({"ours": ours, REFERENCE: unfit, EXTRAPOLATED: line}, 10, {EXTRAPOLATED: "so"})
    assert rows[0].time_ratio == 2.0
    assert rows[0].losses_equal is None
    assert [row.note for row in rows] == ["", "does not fit", "so"]
    assert math.isnan(rows_of({"ours": ours}, 10, {})[0].time_ratio)
