"""`first` on the CPU, where only what a machine that trains has can be imported; and its page."""

from __future__ import annotations

import math
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stowage.flows import gpu
from stowage.flows.benchmarks.gpu.clocks import clocks_now, driver
from stowage.flows.benchmarks.gpu.first import first as _gpu_first
from stowage.flows.benchmarks.gpu.first.first import steps_of
from stowage.flows.benchmarks.gpu.first.page import page_of
from stowage.flows.benchmarks.gpu.first.tests import run as run_tests
from stowage.flows.benchmarks.gpu.first.times import idle, small
from stowage.flows.benchmarks.gpu.steps import NOT_ASKED, StepResult
from stowage.stages.ir.table import read_record
from tests.benchmarks.gpu.alone import alone_everywhere

ROOT = Path(__file__).parents[3]


def call(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stowage.flows.gpu", "first", "--device", "cpu", "--out", str(out), *words]
    return subprocess.run(command, cwd=ROOT, env=alone_everywhere(ROOT), capture_output=True, text=True, timeout=600)


def result(out: Path, name: str) -> StepResult:
    (file,) = (out / "steps").glob(f"*-{name}.json")
    return read_record(file, StepResult)


def test_it_asks_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "card", "--only", "noise"]
    done = call(tmp_path, *only)
    assert done.returncode == 0, done.stderr + done.stdout
    page = (tmp_path / "first.md").read_text()
    assert "- card: not asked: no card" in page
    assert "- efficient attention's philox seed and offset: not asked: no card" in page
    assert "- noise of plain PyTorch against itself: equal" in page
    assert "| lanes | a Llama, streamed" in page
    assert "not run yet" in page
    assert (
        f"`{Path(sys.executable).name} -m stowage.flows.gpu first --out {tmp_path} --device cpu` goes on with" in page
    )
    card = result(tmp_path, "card")
    assert set(card.numbers["versions"]) >= {"python", "torch", "transformers"}
    assert card.numbers["free host memory, bytes"] > 0
    assert gpu.main(["first", "--device", "cpu", "--out", str(tmp_path), *only]) == 0
    assert "card: held, as found before" in capsys.readouterr().out
    assert result(tmp_path, "card").when == card.when


@pytest.mark.long
def test_all_of_it(tmp_path: Path) -> None:
    done = call(tmp_path, "--host-gb", "1", "--budget-s", "1200")
    assert done.returncode == gpu.UNFINISHED_STATUS, done.stdout + done.stderr
    carry = f"carry {tmp_path}/carried/measured.tar.gz to a machine that plans"
    found = {name: result(tmp_path, name) for name in (s.name for s in steps_of("cpu", tmp_path, 0))}
    held = {name for name, each in found.items() if each.status == "held"}
    assert held == {"card", "profile", "strict", "lanes", "noise", "idle", "measure", "small"}
    assert "pytest is not installed here" in found["tests-training"].why
    assert carry in found["plan"].why
    assert carry in (tmp_path / "first.md").read_text()
    assert gpu.main(["first", "--device", "cpu", "--out", str(tmp_path), "--only", "plan"]) == 0, "elsewhere"
    done = call(tmp_path, "--only", "plan", "--only", "train", "--only", "no-limit")
    assert done.returncode == 0, done.stdout
    page = (tmp_path / "first.md").read_text()
    assert "| Stowage at 95% | not asked: no card |" in page
    assert result(tmp_path, "train").numbers["Stowage at 95%"]["allocated"] <= 0.95 * 0.03e9


def test_what_fell_is_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first(*args: Any, **how: Any) -> dict[str, StepResult]:
        return {"card": StepResult("card", "held"), "noise": StepResult("noise", "fell", "it is not so")}

    monkeypatch.setattr(gpu, "first", first)
    words = ["first", "--device", "cpu", "--out", str(tmp_path)]
    assert gpu.main(words) == 1
    monkeypatch.setattr(gpu, "first", lambda *args, **how: {"card": StepResult("card", "held")})
    assert gpu.main(words) == gpu.UNFINISHED_STATUS
    assert gpu.main([*words, "--only", "card"]) == 0
    monkeypatch.undo()
    assert gpu.main([*words, "--only", "nothing"]) == 1
    assert "There is no step 'nothing': there are card, profile" in capsys.readouterr().err


def test_free_memory_is_no_reason_to_measure_again(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        one, other = ({s.name: s.digest({}) for s in steps_of(device, tmp_path, free)} for free in (10**9, 2 * 10**9))
        assert one == other
        assert len(one) == (13 if device == "cpu" else 14)


def test_sizes_of_a_card_fit_the_list() -> None:
    sizes = _gpu_first.sizes_of("cuda")
    assert (sizes.streamed.overrides["num_hidden_layers"], sizes.streamed.overrides["hidden_size"]) == (8, 1024)
    assert sizes.streamed.sequence_length == sizes.measured.sequence_length == 512
    assert sizes.measured.overrides == {"num_hidden_layers": 8}
    assert (sizes.small.overrides["n_layer"], sizes.small.overrides["n_embd"]) == (12, 768)
    everyone = (sizes.dropout, *sizes.strict, sizes.streamed, sizes.measured, sizes.small)
    assert all(job.settings["fused"] and job.device == "cuda" for job in everyone)
    assert all(job.sequence_length >= 512 for job in sizes.strict)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, which says what it was asked."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" >> "$0.asked"\necho "1980, 2619, 41, [N/A]"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    return program


def test_clocks_are_those_of_the_card_in_use(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clocks_now() == "1980 MHz, 2619 MHz of memory, 41 °C"
    assert "-i 3 --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw" in Path(f"{nvidia_smi}.asked").read_text()
    assert driver() == "1980"
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    assert clocks_now() == ""
    monkeypatch.setenv("PATH", "")
    assert clocks_now() == ""


def test_the_page_of_a_card(tmp_path: Path) -> None:
    """Numbers as a card gives them."""
    row = {
        "requested": 10 << 30,
        "allocated": 11 << 30,
        "reserved": 12 << 30,
        "retries": 3,
        "out of memory": 0,
        "limit": 12 << 30,
        "step, seconds": 0.5,
        "predicted, seconds": math.nan,
        "spread": 0.04,
        "clocks": "1980 MHz → 1755 MHz",
        "note": "a|b",
    }
    card = {
        "card": {"name": "NVIDIA H100", "memory, bytes": 80 << 30, "driver": "570.1"},
        "clocks": "1980 MHz",
        "versions": {"torch": "2.11.0"},
        "settings": {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "attention": {"bfloat16": "cuDNN"},
        "efficient attention's philox seed and offset": "cpu () torch.int64",
        "free host memory, bytes": 100 << 30,
        "cores": 16,
        "pinning, bytes per second": 1.5e9,
        "direct write": "refused (Invalid argument)",
    }
    results = {
        "card": StepResult("card", "held", numbers=card, when="2030-01-01T00:00:00"),
        "profile": StepResult("profile", "fell", "killed by SIGSEGV: here", log=("Fatal Python error", "here")),
        "lanes": StepResult("lanes", "timed out", "stopped after 90 s", log=("in wait",), when="2030-01-01T00:05:00"),
        "noise": StepResult("noise", "held", numbers={"noise": "losses within 1e-06"}),
        "idle": StepResult(
            "idle", "held", numbers={"idle share": 0.12, "sum of calls, seconds": 0.008, "step, seconds": 0.009}
        ),
        "measure": StepResult("measure", "held", numbers={"rates": "H100: 80 GB"}),
        "plan": StepResult("plan", "not run", "no solver: carry this there"),
        "train": StepResult("train", "held", numbers={"Stowage at 95%": row}),
    }
    page = page_of(steps_of("cuda", tmp_path, 0), results, "cuda", "CALL", "abc")
    for text in (
        "# The first minutes on a card",
        "- card: name NVIDIA H100, memory, bytes 81,920.0 MiB, driver 570.1",
        "- settings: PYTORCH_CUDA_ALLOC_CONF expandable_segments:True",
        "- code: abc",
        "- when: 2030-01-01T00:00:00 to 2030-01-01T00:05:00",
        "| **fell** | 0 | killed by SIGSEGV: here |",
        "- efficient attention's philox seed and offset: cpu () torch.int64",
        "- pinning: 1.50 GB/s",
        "- noise of plain PyTorch against itself: losses within 1e-06",
        "- idle share of an eager step: 12.0% (calls 8.00 ms of 9.00 ms)",
        "| Stowage at 95% | 10,240.0 MiB | 11,264.0 MiB | 12,288.0 MiB | 3 | 0.500 s | 4% | – | 1980 MHz → 1755 MHz |",
        "→ 1755 MHz | a/b |",
        "```\nFatal Python error\nhere\n```",
        "- `CALL` goes on with tests-tiers, tests-training, strict, plan, no-limit, small, tests-others.",
        "- plan: no solver: carry this there.",
        "- `CALL --again fell` asks again what did not hold: profile, lanes.",
    ):
        assert text in page, text
    assert NOT_ASKED not in page


def test_the_page_says_when_all_of_it_holds(tmp_path: Path) -> None:
    steps = steps_of("cuda", tmp_path, 0)
    page = page_of(steps, {s.name: StepResult(s.name, "held") for s in steps}, "cuda", "CALL")
    assert "everything held: `python -m stowage.flows.gpu race` is next" in page


def test_times_of_a_step() -> None:
    job = vars(_gpu_first.gpt2(1, 64, 1, 16, "cpu"))
    found = idle({"job": job, "steps": 3, "seconds_per_call": 0.0, "min_samples": 1}).numbers
    assert found["idle share"] == 1 - found["sum of calls, seconds"] / found["step, seconds"]
    assert found["card, seconds"] == NOT_ASKED
    both = small({"job": job, "steps": 3}).numbers
    assert both["ratio"] == both["keep all"]["step, seconds"] / both["eager, fused"]["step, seconds"]
    assert 0 < both["keep all"]["host, seconds"] <= both["keep all"]["step, seconds"]


def test_tests_that_are_not_here_are_not_run() -> None:
    found = run_tests({"device": "cpu", "files": ["test_nothing.py"]})
    assert found.status == "not run"
    assert "test_nothing.py is not here: copy the whole repository" in found.why
