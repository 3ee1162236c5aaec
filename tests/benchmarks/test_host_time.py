"""The benchmark of the host's time: it runs, on plans that train."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stowage.flows.benchmarks.gpu.by_rules import ByRules, TracedJob
from stowage.flows.benchmarks.gpu.peers import Plain
from stowage.flows.benchmarks.main_job import host_time as _host_time
from stowage.flows.benchmarks.main_job.host_time import MOVABLE_BYTES, NoLanes, gpt2_job, host_rows, llama_job, text_of
from stowage.stages.device.tiers import PinnedTier


def test_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("WARM_UP", 1), ("TURNS", 1), ("STEPS", 1)):
        monkeypatch.setattr(_host_time, name, count)
    threads = torch.get_num_threads()
    rows = host_rows(1, 2, big_layers=1, big_heads=2)
    assert torch.get_num_threads() == threads
    assert [(r.model, r.plan) for r in rows] == [
        ("GPT-2, 1 layers", "keep all"),
        ("GPT-2, 1 layers, attention in one kernel", "keep all"),
        ("Llama, 1 layers", "keep all"),
        ("Llama, 1 layers", "weights and states offloaded"),
        ("Llama, 1 layers", "the same, updates by the CPU"),
    ]
    assert all(r.step_s > 0 and r.calls > 100 for r in rows)
    assert [r.updates for r in rows[:3]] == [1, 1, 1]
    assert [math.isnan(r.ratio) for r in rows] == [False, False, False, True, True]
    assert rows[1].calls < rows[0].calls, "attention in one kernel makes fewer calls"
    assert "× plain" in text_of(rows)


@pytest.mark.parametrize("cpu_updates", [None, False, True], ids=["all", "streamed", "updates by the CPU"])
def test_what_is_timed_trains(cpu_updates: bool | None) -> None:
    """The same numbers as plain PyTorch, so that nothing is left out."""
    job = (
        llama_job(2, 4) if cpu_updates is not None else gpt2_job(2, 4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )
    traced = TracedJob(job, movable_bytes=MOVABLE_BYTES)
    plan = traced.keep_all() if cpu_updates is None else traced.stream_all(cpu_updates=cpu_updates)
    tier = PinnedTier(lanes=NoLanes()) if cpu_updates is not None else None
    ours, plain = ByRules(traced, traced.together(plan), tier), Plain(job)
    for step in range(4):
        batch = job.batch(step)
        assert torch.equal(ours(batch), plain(batch))
    if tier is not None:
        assert ours.offloading is not None
        ours.offloading.settle_all()
        assert ours.offloading.offloaded_parameters(), "weights are offloaded"
        tier.close()


def test_the_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host_time, "host_rows", lambda: [_host_time.HostTimeRow("m", "p", 3, 1, 2e-3, 1e-3, 0.5)])
    assert "0.50" in _host_time.run_host_time(tmp_path)
    assert (tmp_path / _host_time.OUT).is_file()
