"""Tracing and profiling on the device that trains, and the contestants of the command."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from stowage.flows._gpu_contestant import Request, compete
from stowage.flows._gpu_job import Job, build_shell, first_weights
from stowage.flows._gpu_measure import trace_job
from stowage.stages.device import device_of
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.profile import CostStore, profile_trace
from tests.gpu.by_hand import LLAMA
from tests.matrix import some


def job(device: str, dtype: str = "float32") -> Job:
    return Job("llama", dict(LLAMA), 2, 16, dtype, device, 1 << 40, 1 << 30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shell_has_everything_but_weights(dtype: str, device: str) -> None:
    model, layouts = build_shell(job(device, dtype))
    assert all(p.device.type == device and p.dtype == getattr(torch, dtype) for p in model.parameters())
    assert all(b.device.type == device and torch.isfinite(b).all() for b in model.buffers())
    assert all(p.untyped_storage().nbytes() < 8 for p in model.parameters())
    weights = dict(first_weights(job(device, dtype), layouts))
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(weights[n].shape == p.shape for n, p in model.named_parameters())
    matrices = torch.cat([w.flatten() for w in weights.values() if w.dim() > 1])
    assert float(matrices.float().std()) == pytest.approx(0.02, rel=0.05)
    assert all(torch.equal(weights[n], w) for n, w in first_weights(job(device, dtype), layouts))


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], keep=["bfloat16"]))
def test_every_call_can_be_measured(dtype: str, device: str, tmp_path: Path) -> None:
    trace = trace_job(job(device, dtype))
    assert trace.meta.device == device
    target = DeviceDescription(device_of(device).fingerprint(), *_described(device))
    before = torch.get_rng_state()
    costs = profile_trace(trace, target, CostStore(tmp_path), seconds_per_call=0.0, min_samples=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(c.source == "measured" and c.time_s > 0 and c.workspace_bytes >= 0 for c in costs)
    assert {c.signature for c in costs} == {c.signature for c in trace.calls}
    state = sum(s.nbytes for s in trace.storages if s.role == "state" and s.nbytes > 4)
    assert state == 2 * sum(s.nbytes for s in trace.storages if s.role == "parameter")


def _described(device: str) -> tuple[str, str, int, float, float, float, float, float, float, float]:
    return ("", device, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "kind", some(["plain", "host optimizer", "fsdp2", "zero-offload", "zero-3"], keep=["host optimizer", "fsdp2"])
)
def test_contestants_agree(kind: str, device: str) -> None:
    def run(kind: str, layers: int | None = None) -> list[float]:
        found = compete(Request(kind, asdict(job(device)), 2, False, layers, "", "", ""))
        if "deepspeed cannot be imported" in found.note:
            pytest.skip(found.note)
        assert found.note == ""
        assert len(found.times_s) == 2
        assert not math.isnan(found.time_s)
        return list(found.losses)

    losses, expected = run(kind), run("plain")
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[0] > losses[-1], "it does not learn"
    assert run("plain", layers=1) != expected


def test_too_little_memory_is_a_result(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no limit for a process")
    small = Job("llama", dict(LLAMA), 2, 16, "float32", device, 1 << 20, 1 << 30)
    torch.cuda.empty_cache()
    try:
        found = compete(Request("plain", asdict(small), 1, True, None, "", "", ""))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.note.startswith("does not fit 1.0 MiB")
    assert found.losses == ()
