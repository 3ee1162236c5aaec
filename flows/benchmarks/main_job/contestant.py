"""Runs one contestant of a benchmark in a process of its own, which takes commands line by line.

`python -m stowage.flows.benchmarks.main_job.contestant`

It reads one JSON object a line from standard input and answers each with one line: first the set-up, then `step` or
`measure` commands. So several contestants take turns, step by step, on the same batches.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.api.fit import fit
from stowage.flows.benchmarks.child_process import serve
from stowage.flows.benchmarks.remat.names import MEMORY_BUDGET
from stowage.flows.benchmarks.remat.peers import compiled
from stowage.flows.planning.step import processor_s
from stowage.stages.device.heap import keep_freed_memory
from stowage.stages.ir.command import Parser
from stowage.stages.runtime.observe.measure import Measurement, measure_iteration
from stowage.stages.settings import parse_settings
from stowage.stages.workload import token_stream
from stowage.stages.workload.calls import call_model, loss_of
from stowage.stages.workload.configured import configured_optimizer, configured_workload
from stowage.stages.workload.data import batch_at
from stowage.stages.workload.models import vocabulary_size

OTHERS = ("eager", "gradient_checkpointing", MEMORY_BUDGET)
"""Methods that are not Stowage's."""


class Eager:
    """Plain PyTorch, with or without one thing switched on that saves memory."""

    def __init__(self, model: nn.Module, make_optimizer: Any) -> None:
        self.model = model
        self.called: Any = model
        self.optimizer = make_optimizer(list(model.parameters()))

    def checkpoint(self) -> None:
        """Switch on the model's own gradient checkpointing."""
        self.model.gradient_checkpointing_enable()  # type: ignore[operator]

    def compile(self, memory_budget: float, batch: Any) -> None:
        """Compile the model within an activation memory budget of PyTorch's."""
        self.called, _ = compiled(
            self.model, memory_budget, lambda model: torch.autograd.backward(self._loss(model, batch))
        )

    def _loss(self, model: Any, batch: Any) -> torch.Tensor:
        return loss_of(call_model(model, batch), batch, None)

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one iteration: zero_grad, forward, backward, step."""
        self.optimizer.zero_grad()
        loss = self._loss(self.called, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def measure(self, batch: Any) -> Measurement:
        """Run one iteration under the profiler."""
        self.optimizer.zero_grad()
        return measure_iteration(self, self.model, self.optimizer, batch, [])


def set_up(request: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Make the contestant, its batches, and what it says about itself."""
    settings = parse_settings(request["params"])
    trace = settings.trace
    model = configured_workload(trace).model
    make = configured_optimizer(trace)
    assert make is not None
    data = settings.train.data
    stream = token_stream(data.source, data.column, data.tokenizer, vocabulary=vocabulary_size(model))

    def batches(i: int) -> Any:
        return batch_at(stream, trace.batch_size, trace.sequence_length, settings.train.seed, i)

    keep_freed_memory()  # plain PyTorch gets the same setting as plans
    torch.manual_seed(settings.train.seed)
    method = request["method"]
    if method in OTHERS:
        plain = Eager(model, make)
        if method == "gradient_checkpointing":
            plain.checkpoint()
        elif method == MEMORY_BUDGET:
            plain.compile(request["setting"], batches(0))
            torch.manual_seed(settings.train.seed)
        return plain, batches, {}
    start, used = time.perf_counter(), processor_s()
    step = fit(
        model,
        batches(0),
        make,
        device_budget=request["budget"],
        method=method,
        cache_dir=Path(request["store"]),
        check="never",  # the plan is timed without checks
    )
    about = {
        "plan_s": time.perf_counter() - start,
        "processor_s": processor_s() - used,
        "predicted_peak_bytes": step.plan.device_peak_bytes,
        "predicted_step_time_s": step.plan.step_time_s,
        "lower_bound_s": step.plan.lower_bound_s,
        "recomputed_fraction": step.plan.recomputed_bytes / max(step.plan.activation_bytes, 1),
        "method": step.plan.method,
        "variant": step.plan.variant,
    }
    return step, batches, about


def begin(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make the function that answers `step` and `measure`, on one batch after the other."""
    contestant, batches, about = set_up(request)
    iterations = itertools.count()

    def reply(command: str) -> dict[str, Any]:
        batch = batches(next(iterations))
        if command == "measure":
            measurement = contestant.measure(batch)
            return {"loss": measurement.loss, "peak_bytes": measurement.peak_bytes}
        start = time.perf_counter()
        loss = float(contestant(batch))
        return {"loss": loss, "time_s": time.perf_counter() - start}

    return reply, about


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    serve(begin)
