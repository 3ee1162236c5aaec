"""Compares plans by rules with plain PyTorch, bit for bit, also while copies or computing are late."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stowage.flows.benchmarks.gpu.by_rules import ByRules, TracedJob, weights_of
from stowage.flows.benchmarks.gpu.job import GpuJob, strictly
from stowage.flows.benchmarks.gpu.lanes import Late, late_lanes
from stowage.flows.benchmarks.gpu.peers import Plain
from stowage.flows.benchmarks.gpu.steps import StepAnswer
from stowage.flows.planning.by_rules import RulePlan
from stowage.stages.device.tiers import PinnedTier

ROUNDING = 1e-3
"""Differences that CPU updates may cause on a card: relative of losses, absolute of weights.

Adam divides by the root of the second moment, and near zero one rounding counts in full.
"""


@dataclass(frozen=True)
class ExactRun:
    """A few iterations.

    Attributes:
        losses: loss of each.
        weights: weights at the end, in host memory.
        seconds: time of the last one.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    seconds: float


@dataclass(frozen=True)
class WeightDifference:
    """The difference between two runs.

    Attributes:
        equal: losses and weights are equal bit for bit.
        loss: largest relative difference of losses.
        weight: largest absolute difference of weights.
        first: the iteration whose losses differ first, -1 for none.
    """

    equal: bool
    loss: float
    weight: float
    first: int

    def __str__(self) -> str:
        if self.equal:
            return "equal"
        when = f" from iteration {self.first} on" if self.first >= 0 else ""
        return f"losses within {self.loss:.1e}{when}, weights within {self.weight:.1e}"


def difference(one: ExactRun, other: ExactRun) -> WeightDifference:
    """Compare two runs; NaN differs from everything, itself included."""
    unequal = [i for i, (a, b) in enumerate(zip(one.losses, other.losses, strict=True)) if a != b]
    pairs = [(w, other.weights[name]) for name, w in one.weights.items()]
    return WeightDifference(
        equal=not unequal and all(torch.equal(a, b) for a, b in pairs),
        loss=_worst(abs(a / b - 1) if b else abs(a) for a, b in zip(one.losses, other.losses)),
        weight=_worst(float((a.float() - b.float()).abs().max()) for a, b in pairs if a.numel()),
        first=unequal[0] if unequal else -1,
    )


def _worst(values: Iterable[float]) -> float:
    """Return the largest value; NaN if there is one, which `max` would lose."""
    found = list(values)
    return math.nan if any(v != v for v in found) else max(found, default=0.0)


def plain_run(job: GpuJob, steps: int) -> ExactRun:
    """Run a few iterations of plain PyTorch."""
    contestant = Plain(job)
    losses, seconds = _iterate(contestant, job, steps)
    return ExactRun(losses, weights_of(contestant.model), seconds)


def ruled_run(
    traced: TracedJob, plan: RulePlan, steps: int, late: Sequence[Late] = (), late_s: float = 0.0
) -> ExactRun:
    """Run a few iterations under a plan by rules, with lanes that are late."""
    tier = PinnedTier(lanes=late_lanes(traced.job.device, late, late_s)) if plan.slots else None
    try:
        contestant = ByRules(traced, plan, tier)
        losses, seconds = _iterate(contestant, traced.job, steps)
        return ExactRun(losses, contestant.weights(), seconds)
    finally:
        if tier is not None:
            tier.close()


def _iterate(contestant: Any, job: GpuJob, steps: int) -> tuple[list[float], float]:
    torch.manual_seed(job.seed)
    losses, seconds = [], 0.0
    for iteration in range(steps):
        batch = job.batch(iteration)
        began = time.perf_counter()
        losses.append(float(contestant(batch)))
        seconds = time.perf_counter() - began
    return losses, seconds


def tidy(job: GpuJob) -> None:
    """Release what the last run still occupies."""
    gc.collect()
    if job.device == "cuda":
        torch.cuda.empty_cache()


def strict(asked: dict[str, Any]) -> StepAnswer:
    """Compare every job under every plan by rules with plain PyTorch, with kernels that repeat bit for bit."""
    numbers: dict[str, Any] = {}
    fallen: list[str] = []
    with strictly():
        for content in asked["jobs"]:
            job = GpuJob(**content)
            expected = plain_run(job, asked["steps"])
            found = {"plain again": difference(plain_run(job, asked["steps"]), expected)}
            traced = TracedJob(job)
            plans = {
                "keep all": traced.keep_all(),
                "recompute all": traced.recompute_all(),
                "stream all": traced.stream_all(),
            }
            for name, plan in plans.items():
                tidy(job)
                found[name] = difference(ruled_run(traced, plan, asked["steps"]), expected)
            numbers[job.name()] = {name: str(each) for name, each in found.items()}
            fallen += [f"{name} of {job.name()}" for name, each in found.items() if not each.equal]
    return _answer(fallen, "other numbers than plain PyTorch", numbers)


LATE: tuple[tuple[Late, ...], ...] = ((), ("offload",), ("reload",), ("offload", "reload"), ("compute",))
"""Combinations of lanes that are delayed, on time first."""


def lanes(asked: dict[str, Any]) -> StepAnswer:
    """Compare everything streamed, while copies or computing are late, with everything kept."""
    job = GpuJob(**asked["job"])
    numbers: dict[str, Any] = {}
    fallen: list[str] = []
    with strictly():
        traced = TracedJob(job)
        kept = ruled_run(traced, traced.keep_all(), asked["steps"])
        numbers["plain PyTorch"] = str(difference(plain_run(job, asked["steps"]), kept))
        for cpu_updates in (False, True):
            on_time: ExactRun | None = None
            plan = traced.stream_all(cpu_updates=cpu_updates)
            for late in LATE:
                tidy(job)
                found = ruled_run(traced, plan, asked["steps"], late, asked["late_s"])
                name = (
                    f"{'updates by the CPU' if cpu_updates else 'stream all'}, {' and '.join(late) or 'nothing'} late"
                )
                to_kept = difference(found, kept)
                on_time = on_time or found
                to_on_time = difference(found, on_time)
                rounds = cpu_updates and job.device == "cuda"  # CPU updates round differently from the card's
                ok = (to_on_time.equal and _is_rounding(to_kept)) if rounds else to_kept.equal
                numbers[name] = {
                    "against keep all": str(to_kept),
                    "against nothing late": str(to_on_time),
                    "seconds a step": found.seconds,
                }
                if not ok:
                    fallen.append(name)
    return _answer(fallen, "other numbers: a wait is missing", numbers)


def noise(asked: dict[str, Any]) -> StepAnswer:
    """Run plain PyTorch twice without strictness, to learn how equal two runs can be expected to be."""
    job = GpuJob(**asked["job"])
    runs = [plain_run(job, asked["steps"]) for _ in _tidied(job, asked["times"])]
    worst = [difference(a, b) for a, b in itertools.pairwise(runs)]
    text = next((str(d) for d in worst if not d.equal), "equal")
    numbers = {
        "noise": text,
        "relative loss difference": max(d.loss for d in worst),
        "weight difference": max(d.weight for d in worst),
        "iterations": asked["steps"],
        "job": job.name(),
    }
    return StepAnswer(
        "held", numbers=numbers, lines=(f"plain PyTorch against itself, {asked['steps']} iterations: {text}",)
    )


def _tidied(job: GpuJob, times: int) -> Iterable[int]:
    for number in range(times):
        tidy(job)
        yield number


def _is_rounding(found: WeightDifference) -> bool:
    return found.loss <= ROUNDING and found.weight <= ROUNDING


def _answer(fallen: Sequence[str], what: str, numbers: dict[str, Any]) -> StepAnswer:
    if not fallen:
        return StepAnswer("held", numbers=numbers, lines=("all of them gave the same bits",))
    return StepAnswer("fell", f"{'; '.join(fallen)}: {what}", numbers)
