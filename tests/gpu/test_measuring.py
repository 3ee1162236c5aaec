"""Tracing the job of the command, and its contestants."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch

from stowage.flows.benchmarks.gpu.contestant import WARM_UP, Request, compete
from stowage.flows.benchmarks.gpu.job import GpuJob, build_shell, fill, first_weights
from stowage.flows.benchmarks.gpu.measure import trace_job
from tests.gpu.cases import LLAMA, LONG, SHORT

STEPS = 2
"""That are timed."""


def job(device: str, dtype: str = "float32") -> GpuJob:
    return GpuJob("llama", dict(LLAMA), 2, SHORT if device == "cpu" else LONG, dtype, device, 1 << 40, 1 << 30)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_job_is_traced(dtype: str, device: str) -> None:
    trace = trace_job(job(device, dtype))
    assert trace.meta.device == device
    state = sum(s.nbytes for s in trace.storages if s.role == "state" and s.nbytes > 4)
    assert state == 2 * sum(s.nbytes for s in trace.storages if s.role == "parameter")


@cache
def plain_losses(device: str, layers: int | None = None) -> list[float]:
    """Of every iteration in plain PyTorch, written out, and of the last batch with the first weights."""
    asked = job(device)
    model, layouts = build_shell(asked, layers)
    fill(asked, model, layouts, device)
    model.train()
    last = WARM_UP + STEPS - 1
    with torch.no_grad():
        untrained = float(model(**asked.batch(last)).loss)
    optimizer = asked.make_optimizer(model.parameters())
    losses: list[float] = []
    for iteration in range(last + 1):
        loss = model(**asked.batch(iteration)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return [*losses, untrained]


def compete_as(kind: str, device: str, layers: int | None = None) -> list[float]:
    """Losses of a contestant."""
    found = compete(Request(kind, asdict(job(device)), STEPS, False, layers, "", "", ""))
    if "deepspeed cannot be imported" in found.note:
        pytest.skip(found.note)
    assert found.note == ""
    assert len(found.times_s) == STEPS
    assert not math.isnan(found.time_s)
    return list(found.losses)


def test_the_plain_contestant_is_a_plain_loop(device: str) -> None:
    """Its losses are those of the loop, the last of them with weights that have changed since the first."""
    *expected, untrained = plain_losses(device)
    assert compete_as("plain", device) == expected
    assert untrained != expected[-1], "nothing is updated"
    assert compete_as("plain", device, layers=1) == plain_losses(device, 1)[:-1] != expected


@pytest.mark.parametrize("kind", ["host optimizer", "fsdp2", "zero-offload", "zero-3"])
def test_contestants_agree(kind: str, device: str) -> None:
    assert compete_as(kind, device) == pytest.approx(plain_losses(device)[:-1], rel=1e-4)


def test_too_little_memory_is_a_result(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no limit for a process")
    small = replace(job(device), limit_bytes=1 << 20)
    torch.cuda.empty_cache()
    try:
        found = compete(Request("plain", asdict(small), 1, True, None, "", "", ""))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.note.startswith("does not fit 1.0 MiB")
    assert found.losses == ()
