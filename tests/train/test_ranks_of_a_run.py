"""Several processes that train together by the train stage: how they are started, share data, and go on."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from stowage.stages.ir.errors import ParameterError, PlanMismatchError, StaleStep, StowageError
from stowage.stages.ir.run import StepRecord
from stowage.stages.runtime.sharding.ranks import ranks_of
from stowage.stages.train.comparison import require_near
from stowage.stages.train.launch import is_rank, launch
from stowage.stages.train.rank import Rank, joined
from tests.sharding.processes import on_ranks

FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("error: the data of rank 1 is missing: copy it.")
time.sleep(300)  # as one that waits for the other in a collective
"""
DIES = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""


def records(*losses: float, peak: int = 0) -> list[StepRecord]:
    nan = float("nan")
    return [StepRecord(i, loss, nan, 0.1, 1.0 + peak, nan, peak) for i, loss in enumerate(losses)]


def test_ranks_deal_out_the_stream_and_draw_apart() -> None:
    shares = [Rank(number, 3).batches(lambda i: i) for number in range(3)]
    assert [[share(i) for share in shares] for i in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [Rank(number, 3).seed(7) for number in range(3)] == [7, 8, 9]
    assert [Rank().batches(lambda i: i)(i) for i in range(3)] == [0, 1, 2]


def test_a_record_of_all_ranks_has_their_mean_loss_and_largest_peak() -> None:
    found = joined([*records(1.0, peak=5), *records(2.0, peak=3)])
    assert (found.loss, found.peak_bytes, found.time_s) == (1.5, 5, 6.0)


def _with_another_plan() -> str:
    ranks = ranks_of(dist.group.WORLD)
    try:
        Rank(dist.get_rank(), 2, ranks).agree("plan, model, text or torch", f"run {dist.get_rank()}")
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_a_rank_with_another_plan_is_found_on_all() -> None:
    """Before the first iteration ranks compare names of their runs, in which plan, weights, text and torch count."""
    assert (
        on_ranks(2, _with_another_plan)
        == ["Rank 1 has another plan, model, text or torch than rank 0: start all ranks in the same project."] * 2
    )


@pytest.mark.parametrize(
    ("code", "sentence"),
    [(FAILS, "Rank 1: the data of rank 1 is missing: copy it."), (DIES, "Rank 1 was ended by SIGKILL: run it again")],
)
def test_the_rank_that_failed_first_has_the_word(tmp_path: Path, code: str, sentence: str) -> None:
    (tmp_path / "a_module_of_ranks.py").write_text(code)
    with pytest.raises(StowageError, match=sentence):
        launch("a_module_of_ranks", 2, {"PYTHONPATH": str(tmp_path)})


def test_signals_variables_and_logs_are_as_before(tmp_path: Path) -> None:
    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in signal.valid_signals() if number < signal.SIGRTMIN]
        return handlers, dict(os.environ), logging.getLogger("torch.distributed.elastic").level

    (tmp_path / "a_module_of_ranks.py").write_text("pass")
    before = state()
    launch("a_module_of_ranks", 2, {"PYTHONPATH": str(tmp_path)})
    assert state() == before
    (tmp_path / "a_module_of_ranks.py").write_text(FAILS)
    with pytest.raises(StowageError):
        launch("a_module_of_ranks", 2, {"PYTHONPATH": str(tmp_path)})
    assert state() == before


def test_another_number_of_processes_than_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_rank(2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_rank(2)
    with pytest.raises(ParameterError, match=r"started 2 processes, and trace.ranks is 1"):
        is_rank(1)


def test_losses_of_many_ranks_may_differ_by_rounding_alone() -> None:
    assert require_near(records(1.0, 2.0), records(1.0, 2.0)) == ""
    assert "at most 1.0e-06" in require_near(records(1.0, 2.0), records(1.0, 2.000002))
    with pytest.raises(StaleStep):
        require_near(records(1.0), records(1.01))
    with pytest.raises(StaleStep):
        require_near(records(float("nan")), records(1.0))
