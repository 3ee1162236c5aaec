"""Measures how long the host takes to launch a step when the device has nothing to do.

That time would keep a fast device waiting. A null device: every size of a model but its layers and heads is as small as
can be, so that kernels do next to nothing and what is left is Python, dispatch, the optimizer, and what comes before a
step. Plans are those of a card: updates in few calls, copies through the pinned tier, over lanes that do nothing. Times
are the processor's for the thread that launches, so that neither other processes nor the worker of CPU updates count;
ratios are of the same run.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stowage.flows.api.choices import Choices
from stowage.flows.api.fit import make_step
from stowage.flows.api.steps import Steps
from stowage.flows.api.training_step import TrainingStep
from stowage.flows.benchmarks.gpu.by_rules import ByRules, TracedJob
from stowage.flows.benchmarks.gpu.job import GpuJob
from stowage.flows.benchmarks.gpu.peers import Plain
from stowage.flows.planning.by_rules import RulePlan
from stowage.stages.device.tiers import PinnedTier
from stowage.stages.device.tiers.base import Stream
from stowage.stages.ir.table import write_rows

OUT = "host.parquet"

WARM_UP, TURNS, STEPS = 5, 9, 15
"""Untimed steps, turns of the two contestants, and steps in each turn."""

MOVABLE_BYTES = 1024
"""Size from which tensors are offloaded: weights of matrices are, biases and scales stay, as in a real model."""


@dataclass(frozen=True)
class HostTimeRow:
    """The times of one model under one plan.

    Attributes:
        model: name of the model, for people.
        plan: name of the plan, for people.
        calls: calls of operators in a step.
        updates: calls of the optimizer in a step.
        plain_s: plain PyTorch's step with a fused AdamW, median; NaN where it was not run.
        step_s: median of what a training loop calls, with everything that comes before the step.
        ratio: median over turns of the ratio of the two.
    """

    model: str
    plan: str
    calls: int
    updates: int
    plain_s: float
    step_s: float
    ratio: float


class NoLanes:
    """Lanes whose streams and events are empty; a copy is complete when it is asked for."""

    kind = "cpu"

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return ordinary memory in place of pinned."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def compute(self) -> Any:
        """Return no stream."""
        return None

    def side(self, stream: Stream) -> Any:
        """Return no stream."""
        return None

    def record(self, stream: Any) -> Any:
        """Return no event."""
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Do nothing: every event is complete."""

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once."""
        destination.copy_(source)

    def done(self, event: Any) -> bool:
        """Return that the event is complete."""
        return True

    def finish(self, event: Any) -> None:
        """Do nothing: every event is complete."""

    def time_s(self, event: Any) -> float:
        """Return 0: no time is measured."""
        return 0.0

    def synchronize(self) -> None:
        """Do nothing: nothing is queued."""

    def give_back(self) -> None:
        """Do nothing: no memory is cached."""


def gpt2_job(layers: int, heads: int, **more: Any) -> GpuJob:
    """Make the job of a GPT-2 with a width of one number for each head."""
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": heads, "vocab_size": 256, "n_positions": 8}
    return _job("gpt2", sizes | {"bos_token_id": 0, "eos_token_id": 0} | more)


def llama_job(layers: int, heads: int) -> GpuJob:
    """Make the job of a Llama with two numbers for each head, which rotary embeddings need."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    width = {"hidden_size": 2 * heads, "intermediate_size": 2 * heads, "vocab_size": 256}
    return _job("llama", sizes | width | {"max_position_embeddings": 8})


def _job(architecture: str, overrides: dict[str, Any]) -> GpuJob:
    return GpuJob(architecture, overrides, 1, 2, "float32", "cpu", 1 << 40, 1 << 40)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run kernels in one thread: they are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _step_of(job: GpuJob, folder: Path) -> tuple[TrainingStep, TracedJob, RulePlan]:
    """Make the step that `fit` makes, with a card's plan in the place of its own; return that plan too."""
    plain = Plain(job)
    choices = Choices("1GiB", cache_dir=folder, quick=True, check="never", say=_nothing)
    step = make_step(plain.model, plain.optimizer, Steps(), choices)
    step(job.batch(0))
    known = step.programs.latest
    assert known is not None
    traced = TracedJob(job)
    plan = traced.together(traced.keep_all())
    known.program._step = ByRules(traced, plan).program._step
    return step, traced, plan


def _nothing(text: str) -> None:
    """Ignore what planning says."""


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(STEPS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def _row(
    model: str, plan: str, counted: tuple[TracedJob, RulePlan], step: Callable[[], object], plain: Any, batch: Any
) -> HostTimeRow:
    traced, rules = counted

    def eager() -> object:
        return plain(batch)

    for _ in range(WARM_UP):
        step()
        if plain is not None:
            eager()
    gc.collect()
    turns = [(_median_s(eager) if plain is not None else math.nan, _median_s(step)) for _ in range(TURNS)]
    return HostTimeRow(
        model=model,
        plan=plan,
        calls=len(traced.trace.calls),
        updates=traced.source_of(rules).count("    run.update"),
        plain_s=statistics.median(p for p, _ in turns),
        step_s=statistics.median(s for _, s in turns),
        ratio=statistics.median(s / p for p, s in turns),
    )


def host_rows(layers: int = 12, heads: int = 12, *, big_layers: int = 32, big_heads: int = 32) -> list[HostTimeRow]:
    """Measure the main job's shape, with attention in parts and in one kernel as on a card, and Llama2-7B's.

    Args:
        layers: layers of the main job.
        heads: heads of the main job.
        big_layers: layers of the Llama.
        big_heads: heads of the Llama.
    """
    found: list[HostTimeRow] = []
    with one_thread(), tempfile.TemporaryDirectory() as temporary:
        for what, more in (("", {}), (", attention in one kernel", {"attn_pdrop": 0.0})):
            found.append(_kept(gpt2_job(layers, heads, **more), f"GPT-2, {layers} layers{what}", Path(temporary)))
        job, name = llama_job(big_layers, big_heads), f"Llama, {big_layers} layers"
        found.append(_kept(job, name, Path(temporary)))
        for plan, cpu_updates in (("weights and states offloaded", False), ("the same, updates by the CPU", True)):
            found.append(_streamed(job, name, plan, cpu_updates=cpu_updates))
    return found


def _kept(job: GpuJob, name: str, folder: Path) -> HostTimeRow:
    batch, (step, traced, plan) = job.batch(0), _step_of(job, folder)
    return _row(name, "keep all", (traced, plan), lambda: step(batch), Plain(job), batch)


def _streamed(job: GpuJob, name: str, plan: str, *, cpu_updates: bool) -> HostTimeRow:
    traced = TracedJob(job, movable_bytes=MOVABLE_BYTES)
    rules = traced.together(traced.stream_all(cpu_updates=cpu_updates))
    rules = replace(rules, steps=[replace(step, label="") for step in rules.steps])  # rules change labels row by row
    tier = PinnedTier(lanes=NoLanes())
    training, batch = ByRules(traced, rules, tier), job.batch(0)
    try:
        return _row(name, plan, (traced, rules), lambda: training(batch), None, batch)
    finally:
        assert training.offloading is not None
        training.offloading.settle_all()
        tier.close()


def text_of(rows: list[HostTimeRow]) -> str:
    """Return the rows for a terminal."""
    table = Table("", "plan", "calls", "updates", "plain, ms", "step, ms", "× plain", box=None)
    for r in rows:
        plain = ("–", "–") if math.isnan(r.plain_s) else (f"{r.plain_s * 1e3:.1f}", f"{r.ratio:.2f}")
        table.add_row(r.model, r.plan, str(r.calls), str(r.updates), plain[0], f"{r.step_s * 1e3:.1f}", plain[1])
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()


def run_host_time(out: Path) -> str:
    """Measure, write the table into `out`, and return it for people."""
    rows = host_rows()
    write_rows(out / OUT, HostTimeRow, rows)
    return text_of(rows)
