"""One rank is killed, hangs or fails in the middle of a step: the others end with one sentence, and can be resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import some
from tests.sharding.ended import AT, END_S, LIMIT_S, Ended, ended_of, event, failing_rank, run
from tests.sharding.failing import EVERY, STEPS
from tests.sharding.ranks import ROOT


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    found = run(tmp_path_factory.mktemp("whole") / "run", "goes on")
    assert [rank.code for rank in found] == [0, 0], found[0].text[-3000:]
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    folder = tmp_path_factory.mktemp("killed") / "run"
    return folder, run(folder, "killed")


def test_a_killed_rank_ends_the_others_with_one_sentence(killed: tuple[Path, list[Ended]]) -> None:
    first, last = killed[1]
    assert last.code == -signal.SIGKILL
    assert first.code == 1
    assert first.error["error"] == "RankError", first.text[-3000:]
    assert first.error["at"] - event(last) < END_S
    text = first.error["text"]
    assert "Rank 0 waited for the scatter of the gradients of '" in text
    assert "when another rank ended or failed" in text
    assert "start all ranks again and go on from the last checkpoint (`step.load`)" in text
    assert "\n" not in text


def test_what_is_half_done_cannot_be_read_or_saved(killed: tuple[Path, list[Ended]]) -> None:
    step, save, read, weights, states = killed[1][0].error["again"]
    text = killed[1][0].error["text"]
    assert step == save == f"RankError: {text}"
    assert read.startswith("OffloadedError: Parameter 'first.weight'")
    assert "dealt out to ranks" in weights
    assert "dealt out to ranks" in states


def test_a_restart_resumes_with_the_losses_of_an_uninterrupted_run(
    killed: tuple[Path, list[Ended]], uninterrupted: list[Ended]
) -> None:
    folder, before = killed
    after = run(folder, "goes on")
    assert [rank.code for rank in after] == [0, 0], after[0].text[-3000:]
    for first, second, whole in zip(before, after, uninterrupted, strict=True):
        assert sorted(first.losses) == list(range(AT))
        assert sorted(second.losses) == list(range(AT // EVERY * EVERY, STEPS))
        assert first.losses | second.losses == whole.losses


NAMES = {
    "scatter": "the scatter of the gradients of '",
    "gather": "the gather of '",
    "buffer": "buffer 'norm.running_mean' of rank 0",
}


@pytest.mark.parametrize("where", some(list(NAMES), keep=["scatter"]))
def test_a_rank_that_hangs_is_found_by_the_timeout_with_the_name_of_the_tensor(where: str, tmp_path: Path) -> None:
    found = run(tmp_path / "run", "hangs", timeout_s=5.0, where=where)
    lost = failing_rank(where, 2)
    waiting, hanging = found[1 - lost], found[lost]
    assert waiting.code == 1
    assert waiting.error["error"] == "RankError", waiting.text[-3000:]
    assert 3.0 < waiting.error["at"] - event(hanging) < END_S
    assert f"waited for {NAMES[where]}" in waiting.error["text"]
    assert "until the timeout of the process group: another rank hangs" in waiting.error["text"]


def test_a_rank_that_fails_tells_the_others_at_once(tmp_path: Path) -> None:
    first, last = run(tmp_path / "run", "fails")
    assert [first.code, last.code] == [1, 1]
    assert last.error["error"] == "ValueError"
    assert last.error["again"][0] == (
        "RankError: A step of rank 1 was broken off (ValueError: out of luck), so ranks no longer do the same: start "
        "all ranks again and go on from the last checkpoint (`step.load`)."
    )
    assert first.error["error"] == "RankError", first.text[-3000:]
    assert first.error["at"] - event(last) < END_S


@pytest.mark.long
def test_all_of_three_ranks_end_when_one_is_killed(tmp_path: Path) -> None:
    found = run(tmp_path / "run", "killed", ranks=3, at=0)
    assert [rank.code for rank in found] == [1, 1, -signal.SIGKILL]
    for rank in found[:2]:
        assert rank.error["error"] == "RankError", rank.text[-3000:]
        assert rank.error["at"] - event(found[2]) < END_S


@pytest.mark.long
def test_torchrun_starts_all_again_and_they_go_on(tmp_path: Path, uninterrupted: list[Ended]) -> None:
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            *launch,
            "-m",
            "tests.sharding.failing",
            str(tmp_path),
            "0",
            "killed",
            str(AT),
            "scatter",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    said = ended_of(0, found.stdout).said
    losses = sorted({(s["iteration"], s["loss"]) for s in said if "loss" in s})
    assert losses == sorted({(i, loss) for rank in uninterrupted for i, loss in rank.losses.items()})
    assert sum("event" in s for s in said) == 1
