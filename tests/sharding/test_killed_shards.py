"""Under `shard`, too, a rank that is killed or hangs ends the others, with a sentence that names what they wait for.

All can be started again, and go on from their last checkpoint.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.matrix import some
from tests.sharding.ended import AT, END_S, event, failing_rank, run
from tests.sharding.failing_shard import EVERY, STEPS

MODULE = "tests.sharding.failing_shard"
AGAIN = "start all ranks again and go on from your last checkpoint."
NAMES = {
    "scatter": "the scatter of the gradients of 'blocks.2.0.weight', 'blocks.2.0.bias'",
    "gather": "the gather of 'first.weight', 'first.bias'",
    "buffer": "buffer 'norm.running_mean' of rank 0",
}


@pytest.mark.parametrize("where", some(["scatter", "gather"], keep=["scatter"]))
def test_a_killed_rank_ends_the_others_with_one_sentence(where: str, tmp_path: Path) -> None:
    first, last = run(tmp_path / "run", "killed", where=where, module=MODULE)
    assert last.code == -signal.SIGKILL
    assert first.code == 1
    assert first.error["error"] == "RankError", first.text[-3000:]
    assert first.error["at"] - event(last) < END_S
    text = first.error["text"]
    assert text.startswith(f"Rank 0 waited for {NAMES[where]}"), text
    assert "when another rank ended or failed: see what that one said last" in text
    assert text.endswith(AGAIN)
    assert "\n" not in text
    assert first.error["again"] == f"RankError: {text}"
    assert sorted(first.losses) == list(range(AT))


def test_a_restart_resumes_with_the_losses_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "goes on", module=MODULE)
    before = run(tmp_path / "run", "killed", module=MODULE)
    after = run(tmp_path / "run", "goes on", module=MODULE)
    assert [rank.code for rank in (*whole, *after)] == [0] * 4, after[0].text[-3000:]
    for uninterrupted, first, second in zip(whole, before, after, strict=True):
        assert sorted(first.losses) == list(range(AT))
        assert sorted(second.losses) == list(range(AT // EVERY * EVERY, STEPS))
        assert first.losses | second.losses == uninterrupted.losses


@pytest.mark.parametrize("where", some(list(NAMES), keep=["gather"]))
def test_a_rank_that_hangs_is_found_by_the_timeout_with_the_names(where: str, tmp_path: Path) -> None:
    found = run(tmp_path / "run", "hangs", timeout_s=5.0, where=where, module=MODULE)
    lost = failing_rank(where, 2)
    waiting, hanging = found[1 - lost], found[lost]
    assert waiting.code == 1
    assert waiting.error["error"] == "RankError", waiting.text[-3000:]
    assert 3.0 < waiting.error["at"] - event(hanging) < END_S
    text = waiting.error["text"]
    assert text.startswith(f"Rank {1 - lost} waited for {NAMES[where]}"), text
    assert "until the timeout of the process group: another rank hangs" in text
    assert text.endswith(AGAIN)


@pytest.mark.long
def test_all_of_three_ranks_end_when_one_is_killed(tmp_path: Path) -> None:
    found = run(tmp_path / "run", "killed", ranks=3, at=0, module=MODULE)
    assert [rank.code for rank in found] == [1, 1, -signal.SIGKILL]
    for rank in found[:2]:
        assert rank.error["error"] == "RankError", rank.text[-3000:]
        assert rank.error["at"] - event(found[2]) < END_S
