"""One rank is killed, hangs or fails in the middle of a step: the others end with one sentence, and can be resumed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sharding.failing import EVERY, STEPS
from tests.sharding.ranks import MARK, ROOT

LIMIT_S = 240.0
END_S = 60.0
AT = 3


@dataclass
class Ended:
    """How one rank has ended, and what it has said."""

    code: int
    said: list[Any]
    text: str

    @property
    def losses(self) -> dict[int, float]:
        return {said["iteration"]: said["loss"] for said in self.said if "loss" in said}

    @property
    def error(self) -> dict[str, Any]:
        return next((said for said in self.said if "error" in said), {})


def run(folder: Path, how: str, *, at: int = AT, ranks: int = 2, timeout_s: float = 0.0) -> list[Ended]:
    """Run `failing` on each rank until all have ended by themselves; a rank that hangs is killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"OMP_NUM_THREADS": "1"}
    folder.mkdir(exist_ok=True)
    outputs = [folder / f"said by {rank}" for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.sharding.failing", str(folder), str(timeout_s), how, str(at)],
                    cwd=ROOT,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + LIMIT_S
    try:
        for process in processes[:-1] if how == "hangs" else processes:
            process.wait(max(1.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_ended(p.returncode, output.read_text()) for p, output in zip(processes, outputs, strict=True)]


def _ended(code: int, text: str) -> Ended:
    said = [json.loads(line[len(MARK) :]) for line in text.splitlines() if line.startswith(MARK)]
    return Ended(code, said, text)


def event(ended: Ended) -> float:
    """Return the time at which the rank failed."""
    return float(next(said["at"] for said in ended.said if "event" in said))


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


def test_a_rank_that_hangs_is_found_by_the_timeout_with_the_name_of_the_tensor(tmp_path: Path) -> None:
    first, last = run(tmp_path / "run", "hangs", timeout_s=5.0)
    assert first.code == 1
    assert first.error["error"] == "RankError", first.text[-3000:]
    assert 3.0 < first.error["at"] - event(last) < END_S
    assert "waited for the scatter of the gradients of '" in first.error["text"]
    assert "until the timeout of the process group: another rank hangs" in first.error["text"]


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
        [sys.executable, "-m", *launch, "-m", "tests.sharding.failing", str(tmp_path), "0", "killed", str(AT)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    said = _ended(0, found.stdout).said
    losses = sorted({(s["iteration"], s["loss"]) for s in said if "loss" in s})
    assert losses == sorted({(i, loss) for rank in uninterrupted for i, loss in rank.losses.items()})
    assert sum("event" in s for s in said) == 1
