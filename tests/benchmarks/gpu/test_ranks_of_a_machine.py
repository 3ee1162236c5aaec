"""`gpu ranks` on the CPU: contestants on two ranks, their page, and what a second call does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stowage.flows import gpu
from stowage.flows.benchmarks.gpu.ranks.page import page_of
from stowage.flows.benchmarks.gpu.ranks.whole import RanksEffort, job_of_ranks, ranks_here, steps_of_ranks
from stowage.flows.benchmarks.gpu.steps import StepResult
from stowage.stages.ir.errors import ParameterError

CALL = ["ranks", "--device", "cpu", "--quick", "--steps", "2", "--rounds", "1", "--out"]


def is_run(path: Path) -> bool:
    return path.stem in ("ddp", "fsdp2", "planned-ddp", "planned-fsdp2") and "about" in path.read_text()


@pytest.mark.long
def test_plans_train_as_ddp_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([*CALL, str(tmp_path)]) == 0
    page = (tmp_path / "ranks.md").read_text()
    assert "# 2 processes of one CPU, with gloo" in page
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    for planned in ("one plan, at the peak of FSDP2", "one plan, at 60% of DDP's peak"):
        assert "equal, bit for bit" in rows[planned]
    peaks = {path.stem: json.loads(path.read_text())["peak_bytes"] for path in tmp_path.rglob("*.json") if is_run(path)}
    assert peaks["planned-ddp"] <= 0.6 * peaks["ddp"], "the largest peak of a plan is within its budget"
    assert peaks["planned-fsdp2"] <= peaks["fsdp2"]
    capsys.readouterr()
    assert gpu.main([*CALL, str(tmp_path)]) == 0
    assert "planned-ddp: held, as found before" in capsys.readouterr().out


def test_fewer_cards_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert ranks_here("cuda", None) == 3
    assert ranks_here("cuda", 2) == 2
    assert ranks_here("cpu", None) == 2
    with pytest.raises(ParameterError, match="4 ranks need a card each, and there are 3"):
        ranks_here("cuda", 4)
    with pytest.raises(ParameterError, match="exchanges nothing"):
        ranks_here("cpu", 1)


def test_the_page_says_what_is_equal_and_what_fell(tmp_path: Path) -> None:
    steps = steps_of_ranks(job_of_ranks("cpu"), 2, tmp_path, RanksEffort(3, quick=True))
    numbers = {"peak_bytes": 1 << 20, "seconds": [0.4, 0.5, 0.6], "budget_bytes": 2 << 20, "about": ""}
    compared = {"planned-ddp": {"equal": False, "loss": 1e-6, "weight": 2e-5}}
    results = {
        "ddp": StepResult("ddp", "held", numbers=numbers),
        "fsdp2": StepResult("fsdp2", "fell", why="killed by SIGKILL", log=("its last words",)),
        "planned-ddp": StepResult("planned-ddp", "held", numbers=numbers),
        "sharded-fsdp2": StepResult(
            "sharded-fsdp2", "held", numbers={"refused": "no", "needed_bytes": 3 << 20, "budget_bytes": 2 << 20}
        ),
        "compare": StepResult("compare", "fell", why="planned-ddp trains other numbers", numbers=compared),
    }
    page = page_of(steps, results, "a job", 2, "cpu", "the command")
    assert (
        "| one plan, at 60% of DDP's peak | 2.00 MiB | 1.00 MiB | 500.00 ms | 450.00 ms to 550.00 ms | losses" in page
    )
    assert "| FSDP2 | | | | | killed by SIGKILL |" in page
    assert "| one plan, at the peak of FSDP2 | | | | | not run yet |" in page
    assert "| FSDP2 by `shard`, at the peak of FSDP2 | 2.00 MiB | – | – | – | nothing fits; 3.00 MiB would do |" in page
    assert "`its last words`" in page
    assert "- compare: fell: planned-ddp trains other numbers" in page
    assert "`the command` goes on" in page
