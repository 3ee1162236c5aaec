"""Plans by rules are plain PyTorch bit for bit, and lanes that are late show a wait that is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from stowage.flows.benchmarks.gpu.by_rules import ByRules, TracedJob
from stowage.flows.benchmarks.gpu.first.exact import ExactRun, difference, lanes, noise, plain_run, ruled_run, strict
from stowage.flows.benchmarks.gpu.first.first import gpt2, llama
from stowage.flows.benchmarks.gpu.job import GpuJob, strictly
from stowage.flows.benchmarks.gpu.lanes import HostLanes, Late
from stowage.stages.device.tiers import host

GPT2 = gpt2(1, 64, 2, 16, "cpu")
LLAMA = llama(1, 64, 256, 2, 16, "bfloat16", "cpu")
STEPS = 3


@pytest.mark.parametrize("job", [GPT2, LLAMA], ids=["gpt2 with dropout", "llama in bfloat16"])
def test_every_rule_is_plain_pytorch(job: GpuJob) -> None:
    expected = plain_run(job, STEPS)
    assert len(set(expected.losses)) == STEPS
    traced = TracedJob(job)
    kept = traced.keep_all()
    plans = {
        "keep": kept,
        "recompute": traced.recompute_all(),
        "stream": traced.stream_all(),
        "at once": traced.stream_all(ahead=0, lag=0),
        "updates by the CPU": traced.stream_all(cpu_updates=True),
    }
    for name, plan in plans.items():
        found = difference(ruled_run(traced, plan, STEPS), expected)
        assert found.equal, f"{name}: {found}"
    assert len([s for s in plans["recompute"].steps if s.node >= 0]) > len(traced.nodes)
    assert not kept.slots
    assert traced.judge(plans["stream"]).peak_bytes < 0.9 * traced.judge(kept).peak_bytes
    assert sum(s.kind == "update" for s in plans["updates by the CPU"].steps) > 0


def test_clipping_by_rules() -> None:
    """The scale of clipping goes down for updates by the CPU, once."""
    traced = TracedJob(LLAMA, max_grad_norm=0.1)
    plan = traced.stream_all(cpu_updates=True)
    kept = ruled_run(traced, traced.keep_all(), STEPS)
    assert difference(ruled_run(traced, plan, STEPS), kept).equal
    assert not difference(plain_run(LLAMA, STEPS), kept).equal, "it would clip nothing"


def test_weights_are_reloaded() -> None:
    traced = TracedJob(LLAMA)
    tier = host.PinnedTier(lanes=HostLanes())
    contestant = ByRules(traced, traced.stream_all(), tier)
    assert contestant.offloading is not None
    assert contestant.offloading.offloaded_parameters()
    assert all(torch.isfinite(w).all() for w in contestant.weights().values())
    assert not contestant.offloading.offloaded_parameters()
    tier.close()


def test_late_lanes_hold() -> None:
    answer = lanes({"job": asdict(LLAMA), "steps": 2, "late_s": 1e-4})
    assert answer.status == "held", answer.why
    assert len(answer.numbers) == 11
    assert all("equal" in str(found) for found in answer.numbers.values())


def _no_wait(self: Any) -> None:
    self._tensors = ()
    self._tier._unwaited.discard(self)


def _without(direction: str) -> Callable[[Any], None]:
    real = host._PinnedTransfer.wait

    def wait(self: Any) -> None:
        (_no_wait if self._stream == direction else real)(self)

    return wait


def _unordered(self: HostLanes, stream: Any, event: Any) -> None:
    """The two directions do not wait for each other."""
    if stream == "compute":
        event.reached.wait()


@pytest.mark.parametrize("late", ["offload", "reload"])
def test_late_lanes_find_a_missing_wait(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an offload two are missing: the plan's own, and the one of a reload of the same slot."""
    traced = TracedJob(LLAMA)
    plan = traced.stream_all()
    kept = ruled_run(traced, traced.keep_all(), 2)
    assert difference(ruled_run(traced, plan, 2, (late,), 1e-3), kept).equal
    monkeypatch.setattr(host._PinnedTransfer, "wait", _without(late))
    if late == "offload":
        monkeypatch.setattr(HostLanes, "wait", _unordered)
    assert not difference(ruled_run(traced, plan, 2, (late,), 1e-3), kept).equal


def test_a_missing_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host._PinnedTransfer, "wait", _without("reload"))
    answer = lanes({"job": asdict(LLAMA), "steps": 1, "late_s": 1e-3})
    assert answer.status == "fell"
    assert "stream all, reload late" in answer.why
    assert "a wait is missing" in answer.why


def test_strict_compares_all_of_them() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    answer = strict({"jobs": [asdict(GPT2)], "steps": 2})
    assert answer.status == "held"
    assert set(answer.numbers[GPT2.name()]) == {"plain again", "keep all", "recompute all", "stream all"}
    assert torch.are_deterministic_algorithms_enabled() == before


def test_strict_kernels_end_with_the_block() -> None:
    with strictly():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    with strictly(False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_noise_is_measured() -> None:
    answer = noise({"job": asdict(LLAMA), "steps": 2, "times": 2})
    assert answer.status == "held"
    assert answer.numbers["noise"] == "equal", "a CPU has none"


def test_differences_are_seen() -> None:
    one = ExactRun([2.0, 1.0], {"a": torch.ones(2)}, 1.0)
    assert str(difference(one, one)) == "equal"
    later = difference(ExactRun([2.0, 1.5], {"a": torch.tensor([1.0, 1.25])}, 1.0), one)
    assert (later.equal, later.loss, later.weight, later.first) == (False, 0.5, 0.25, 1)
    assert str(later) == "losses within 5.0e-01 from iteration 1 on, weights within 2.5e-01"
    nothing = ExactRun([2.0, float("nan")], {"a": torch.tensor([float("nan"), 1.0])}, 1.0)
    same = difference(nothing, nothing)
    assert not same.equal
    assert same.loss != same.loss
    assert same.weight != same.weight
