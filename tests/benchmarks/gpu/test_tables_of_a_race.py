"""Tables of a race, and what is carried: the parts that need no race."""

from __future__ import annotations

import math
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stowage.flows.benchmarks.gpu import whole_race as _gpu_whole_race
from stowage.flows.benchmarks.gpu.carried import pack, unpack
from stowage.flows.benchmarks.gpu.contestant import ContestantResult
from stowage.flows.benchmarks.gpu.job import GpuJob, layers_of
from stowage.flows.benchmarks.gpu.measure import fitting_dtype
from stowage.flows.benchmarks.gpu.race import _environment, _said, few_layers, like
from stowage.flows.benchmarks.gpu.table import (
    EXTRAPOLATED,
    REFERENCE,
    REPEATED,
    extrapolate,
    markdown_of,
    noise_text,
    rows_of,
    text_of,
)
from stowage.flows.benchmarks.gpu.whole_race import RaceEffort, about_of, jobs_of, notes_of, run_race, strict_of
from stowage.stages.ir.errors import StowageError, TableError

LAYERS = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 256,
}


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


def test_the_type_follows_the_host_memory() -> None:
    assert fitting_dtype(1_000, 20_800) == "float32"
    assert fitting_dtype(1_000, 20_799) == "bfloat16"


def test_fewer_layers_than_there_are() -> None:
    assert few_layers(32) == (8, 16)
    assert few_layers(3) == (1, 2)
    assert layers_of(GpuJob("llama", {}, 1, 16, "float32", "cpu", 1, 1)) == 32


def test_layers_are_extrapolated_along_a_line() -> None:
    two, four = (
        ContestantResult("", times_s=(1.0, 3.0, 2.0), peak_bytes=100),
        ContestantResult("", times_s=(3.0,), peak_bytes=160),
    )
    whole = extrapolate(2, two, 4, four, 32)
    assert whole is not None
    assert whole.time_s == pytest.approx(2.0 + 0.5 * 30)
    assert whole.times_s == pytest.approx((17.0 - 14.0, 17.0, 17.0 + 14.0)), "14 times the spread of the smaller one"
    assert whole.peak_bytes == 100 + 30 * 30
    assert extrapolate(2, two, 4, ContestantResult("does not fit"), 32) is None


def test_rows_compare_with_the_best_reference() -> None:
    ours = ContestantResult("", losses=(2.0, 1.0), times_s=(3.0,))
    plain = ContestantResult("", losses=(2.0, 1.001), times_s=(2.0,))
    line = ContestantResult("", times_s=(1.5,))
    limits, notes = {"ours": 10, REFERENCE: -1}, {EXTRAPOLATED: "so"}
    row = rows_of({"ours": ours, REFERENCE: plain, EXTRAPOLATED: line}, limits, notes)[0]
    assert (row.time_ratio, row.losses_equal, row.limit_bytes) == (1.5, False, 10)
    assert row.worst_loss_difference == pytest.approx(0.001 / 1.001)
    unfit = replace(plain, note="does not fit", losses=(), times_s=())
    rows = rows_of({"ours": ours, REFERENCE: unfit, EXTRAPOLATED: line}, limits, notes)
    assert rows[0].time_ratio == 2.0
    assert rows[0].losses_equal is None
    assert [row.note for row in rows] == ["", "does not fit", "so"]
    assert math.isnan(rows_of({"ours": ours}, limits, {})[0].time_ratio)


def test_what_an_allocator_tells_is_in_the_table() -> None:
    """As on a card that is short of memory and gets warm."""
    ours = ContestantResult(
        "",
        losses=(2.0, 1.0),
        times_s=(1.0, 1.1, 0.9),
        peak_bytes=11 << 20,
        reserved_bytes=12 << 20,
        requested_bytes=10 << 20,
        retries=4,
        timed_retries=3,
        out_of_memory=1,
        pin_s=30.0,
        pinned_bytes=50 * 10**9,
        clocks=("1980 MHz", "1755 MHz"),
        weights="a",
    )
    plain = replace(ours, retries=0, out_of_memory=0, weights="b")
    rows = rows_of({"ours": ours, REFERENCE: plain}, {"ours": 12 << 20}, {})
    assert (rows[0].timed_retries, rows[0].clocks, rows[0].pin_s) == (3, "1980 MHz → 1755 MHz", 30.0)
    assert rows[0].weights_equal is False
    about = "ready after 0 s, 30 s of it for pinning host memory, 3 retries of the allocator in timed steps"
    assert about_of(rows[0]) == f"{about}, clocks 1980 MHz → 1755 MHz"
    assert about_of(replace(rows[0], pin_s=math.nan, timed_retries=-1, clocks="")) == "ready after 0 s"
    assert rows[0].spread == pytest.approx(0.2)
    text = text_of(rows).splitlines()
    assert " ".join(text[1].split()) == (
        "ours 12 MiB 10 MiB 11 MiB 12 MiB 4, 1 failed – 1.000 s 20% 1.00 – equal, weights differ"
    )
    assert markdown_of(rows).splitlines()[2].startswith("| ours | 12 MiB | 10 MiB | 11 MiB | 12 MiB | 4, 1 failed |")
    assert _said(ours).endswith("4 retries, ready after 0 s, 30 s of it for pinning 50.0 GB; 1980 MHz → 1755 MHz")


def test_noise_of_plain_pytorch_is_told() -> None:
    plain = ContestantResult("", losses=(2.0, 1.0), times_s=(1.0,))
    other = replace(plain, losses=(2.0, 1.001))
    equal, unequal = (rows_of({REFERENCE: plain, REPEATED: each}, {}, {}) for each in (plain, other))
    assert noise_text(equal).endswith("over 2 iterations: losses equal")
    assert noise_text(unequal).endswith("losses within 1e-03; nobody can be expected to be closer")
    assert noise_text(rows_of({REFERENCE: plain}, {}, {})) == ""


def test_float32_is_said_to_flatter() -> None:
    job = GpuJob("llama", {"num_hidden_layers": 4}, 1, 16, "float32", "cpu", 10, 10)
    assert any("float32 without TF32" in note for note in notes_of(job, []))
    assert not any("TF32" in note for note in notes_of(replace(job, dtype="bfloat16"), []))
    assert any("must be equal" in note for note in notes_of(replace(job, strict=True), []))


def test_the_strict_job_is_smaller_where_the_job_is_large() -> None:
    tiny = {**LAYERS, "num_hidden_layers": 32}
    large = GpuJob("llama", tiny, 1, 16, "bfloat16", "cpu", 1200, 0)
    reduced = strict_of(large)
    assert reduced.strict
    assert reduced.overrides == {**tiny, "num_hidden_layers": 8}
    assert reduced.limit_bytes == 600, "activations do not shrink with it"
    small = replace(large, overrides={**LAYERS}, limit_bytes=12)
    found = jobs_of(small, ["float32", "bfloat16"])
    assert {name: (job.dtype, job.strict) for name, job in found.items()} == {
        "float32": ("float32", False),
        "bfloat16": ("bfloat16", False),
        "strict": ("float32", True),
    }
    assert found["strict"].limit_bytes == 12


def test_settings_of_the_allocator_reach_old_and_new_releases() -> None:
    assert _environment("expandable_segments:True", strict=True) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert _environment("") == {}


def test_names_of_contestants() -> None:
    names = [REFERENCE, REPEATED, "FSDP2"]
    assert like(names, [REFERENCE]) == [REFERENCE]
    assert like(names, ["NO LIMIT"]) == [REFERENCE, REPEATED]
    assert like(names, ["again", "fsdp"]) == [REPEATED, "FSDP2"]
    assert like(names, []) == []
    assert like(names, [""]) == names


def test_measuring_ends_with_the_time_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = GpuJob("llama", LAYERS, 1, 16, "float32", "cpu", 10, 10)
    how: Any = {"fractions": (0.95,), "method": "auto", "stores": tmp_path / "stores"}
    monkeypatch.setattr(_gpu_whole_race, "PROCESS", (sys.executable, "-c", "import time; time.sleep(600)"))
    for budget_s, when in ((1.0, "while"), (0.0, "before")):
        raced = run_race({"one": job}, tmp_path, lambda t: None, RaceEffort(1, 0.0, 1, budget_s=budget_s), **how)
        assert raced.missing == [f"one: the time was used up {when} measuring"]
        assert raced.missing[0] in (tmp_path / "race.md").read_text()
        assert raced.tables == {}
    monkeypatch.setattr(_gpu_whole_race, "PROCESS", (sys.executable, "-c", "print('it broke'); raise SystemExit(3)"))
    with pytest.raises(StowageError, match=r"one: measuring ended with exit status 3: it broke \(.*measure.log has"):
        run_race({"one": job}, tmp_path, lambda t: None, RaceEffort(1, 0.0, 1), **how)
