"""The command for a machine with a GPU, on the CPU: what it would do there, with a tiny model.

Measuring and every contestant run where only torch, transformers, pyarrow and safetensors are installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

from stowage.flows import gpu
from stowage.flows.benchmarks.gpu import race as _gpu_race
from stowage.flows.benchmarks.gpu import whole_race
from stowage.flows.benchmarks.gpu.carried import MEASURED, PLANNED, is_planned, pack, unpack
from stowage.flows.benchmarks.gpu.contestant import ContestantResult, Request
from stowage.flows.benchmarks.gpu.race import (
    CHROME_TRACE,
    LOOSE_PEERS,
    PEERS,
    RESULTS,
    TABLE,
    Results,
)
from stowage.flows.benchmarks.gpu.table import (
    EXTRAPOLATED,
    REFERENCE,
    REPEATED,
    GpuRow,
    text_of,
)
from stowage.flows.pipeline.project import import_path, stage_environment
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.table import read_record, read_rows
from tests.benchmarks.gpu.alone import alone_everywhere
from tests.matrix import THOROUGH

ROOT = Path(__file__).parents[3]
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
SOME = ("Stowage", REFERENCE)
"""Contestants of a short run; a thorough one has all."""

PATIENCE_S = 300.0


def is_thorough() -> bool:
    """Whether this run takes its time."""
    return settings().max_examples >= THOROUGH


def alone(*words: str) -> subprocess.CompletedProcess[str]:
    """A module in a process of its own, with little installed."""
    command = [sys.executable, ALONE, *words]
    return subprocess.run(command, cwd=ROOT, env=stage_environment(ROOT), capture_output=True, text=True, timeout=600)


def race(out: Path, *words: str) -> list[str]:
    """The command of a race."""
    both = [] if is_thorough() else ["--no-strict"]
    return [sys.executable, "-m", "stowage.flows.gpu", "race", *JOB, *both, "--out", str(out), *words]


def folders(out: Path) -> list[Path]:
    """Of its jobs."""
    return [out / "float32", *([out / "strict"] if is_thorough() else [])]


def results(out: Path) -> Results:
    """Of the contestants so far."""
    return read_record(out / RESULTS, Results) if (out / RESULTS).exists() else Results({})


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a race on a machine that cannot plan, which was killed on the way."""
    folder = tmp_path_factory.mktemp("gpu")
    only = [] if is_thorough() else [word for name in SOME for word in ("--only", name)]
    everywhere = alone_everywhere(ROOT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", everywhere["PYTHONPATH"])
        patch.setattr(whole_race, "why_no_plan", lambda: "no solver is here")
        assert gpu.main(race(folder)[3:]) == gpu.UNFINISHED_STATUS
    for each in folders(folder):
        assert f"no solver is here: carry {each / MEASURED} to a machine that plans" in (folder / "race.md").read_text()
        assert gpu.main(["plan", *JOB, "--stores", str(folder / "stores"), "--out", str(each)]) == 0
    process = subprocess.Popen(race(folder, *only), cwd=ROOT, env=everywhere)
    end = time.monotonic() + PATIENCE_S
    while not results(folder / "float32").by_name:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = results(folder / "float32").by_name
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", everywhere["PYTHONPATH"])
        patch.setattr(gpu, "say", said.append)
        assert gpu.main(race(folder, *only)[3:]) == 0
    assert "float32: measured before" in said
    assert "float32: planned before" in said
    after = results(folder / "float32").by_name
    assert len(after) > len(before) >= 1
    for name, found in before.items():
        assert after[name] == found, "it ran again"
        assert any(f"{name}: " in line and "as found before" in line for line in said)
    return folder


@pytest.fixture(scope="module")
def out(raced: Path) -> Path:
    """The folder of its job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gpu_race, "CONTESTANT", (sys.executable, ALONE, "stowage.flows.benchmarks.gpu.contestant"))
        patch.setenv("PYTHONPATH", str(import_path(ROOT)))
        only = [word for name in PEERS_OF_SOME for word in ("--only", f"{name}")]
        assert gpu.main(["train", *JOB, *only, "--out", str(raced / "float32")]) == 0
    return raced / "float32"


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
    few = [f"plain PyTorch, {layers} layers" for layers in (1, 2)]
    looser = [f"{name}, 2 × the limit" for name in LOOSE_PEERS]
    everyone = ["Stowage at 95%", REFERENCE, REPEATED, *few, *PEERS, *looser, EXTRAPOLATED]
    assert list(rows) == (everyone if is_thorough() else ["Stowage at 95%", REFERENCE, *PEERS_OF_SOME])
    ours, plain = rows["Stowage at 95%"], rows[REFERENCE]
    assert ours.losses_equal
    assert len(ours.losses) == 3
    assert len(set(ours.losses)) == 3
    assert 0 < ours.peak_bytes <= 0.95 * 0.03e9
    assert ours.predicted_peak_bytes <= 0.95 * 0.03e9
    assert plain.peak_bytes > 0.03e9, "the limit would not limit"
    assert ours.limit_bytes == 30_000_000
    assert plain.limit_bytes == -1
    for name in rows.keys() & {"gradient checkpointing, optimizer in host memory", *PEERS_OF_SOME}:
        assert rows[name].note in ("", "keeps all weights on the device"), name
        assert rows[name].time_s > 0
        assert rows[name].worst_loss_difference < 1e-5
    for name in (n for n in rows if "DeepSpeed" in n):
        assert rows[name].time_s > 0 or "deepspeed" in rows[name].note
    if is_thorough():
        assert rows[looser[1]].limit_bytes == 60_000_000
        assert rows[REPEATED].losses_equal
        assert rows[EXTRAPOLATED].peak_bytes == pytest.approx(plain.peak_bytes, rel=0.05)
    assert "Stowage at 95%" in text_of([*rows.values()])


def test_equality_is_of_weights_too(raced: Path) -> None:
    if not is_thorough():
        pytest.skip("a short run has no strict job")
    rows = {row.contestant: row for row in read_rows(raced / "strict" / TABLE, GpuRow)}
    assert [*rows] == ["Stowage at 95%", REFERENCE, REPEATED]
    assert all(row.losses_equal and row.weights_equal for row in rows.values())


def test_the_traced_iteration_has_copies_and_steps(out: Path) -> None:
    events = json.loads((out / CHROME_TRACE).read_text())["traceEvents"]
    measured = {e["cat"] for e in events if e["ph"] == "X" and e["pid"] == 2}
    assert {"compute", "offload", "reload", "update"} <= measured


def test_what_is_carried_is_small(out: Path) -> None:
    assert (out / MEASURED).stat().st_size < 1 << 20
    assert (out / PLANNED).stat().st_size < 1 << 20


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


def test_what_was_measured_for_another_job_is_refused(raced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["race", *JOB, "--no-strict", "--out", str(raced), "--limit-gb", "0.04"]) == 1
    said = capsys.readouterr().err
    assert "is of another job (llama, float32, 1 × 16, AdamW, limit 0.03 GB) than the one asked for" in said
    assert "--again measure" in said


def test_plans_of_another_measuring_do_not_count(out: Path, tmp_path: Path) -> None:
    assert is_planned(out)
    for name in (MEASURED, PLANNED):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    assert is_planned(tmp_path)
    unpack(tmp_path / MEASURED, tmp_path / "measured")
    (tmp_path / "measured" / "more.txt").write_text("x")
    pack(tmp_path / MEASURED, tmp_path / "measured")
    assert not is_planned(tmp_path)
    (tmp_path / MEASURED).unlink()
    assert not is_planned(tmp_path)


def test_a_contestant_is_asked_again_only_for_something_else(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(request: Request, *rest: object) -> ContestantResult:
        ran.append(f"{request.kind} {request.steps}")
        notes = {3: "died: of something", 4: "stopped after 10 s"}
        return ContestantResult(notes.get(request.steps, ""), losses=(1.0,), times_s=(1.0,))

    monkeypatch.setattr(_gpu_race, "_run", run)
    kept = (out / RESULTS).read_bytes(), (out / TABLE).read_bytes()
    (out / RESULTS).unlink()
    try:
        for again, steps in (((), 1), (("limit, AG",), 1), ((), 2), ((), 2)):
            _gpu_race.race(out, lambda text: None, steps=steps, only=["no limit"], again=again)
            ran.append("then")
        _gpu_race.race(out, lambda text: None, steps=3, only=["no limit"], again=(), until=0.0)
        soon = time.monotonic() + 10.0
        _gpu_race.race(out, lambda text: None, steps=4, only=["no limit"], again=(), until=soon)
        ran.append("then")
        _gpu_race.race(out, lambda text: None, steps=4, only=[REFERENCE], again=())
        for again in ((), ("fell",), ()):
            _gpu_race.race(out, lambda text: None, steps=3, only=[REFERENCE], again=again)
    finally:
        (out / RESULTS).write_bytes(kept[0])
        (out / TABLE).write_bytes(kept[1])
    first = ["plain 1", "plain 1", "then", "plain 1", "then", "plain 2", "plain 2", "then", "then"]
    assert ran == [*first, "plain 4", "then", "plain 4", "plain 3", "plain 3"]
