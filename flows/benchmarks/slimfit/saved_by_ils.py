"""Measures what forward saves under the units that ILS really chooses, step by step in a short run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from stowage.flows.benchmarks.slimfit.models import Frozen, another
from stowage.flows.benchmarks.slimfit.saved import ReadyStep, last, worst
from stowage.flows.benchmarks.slimfit.trials import distances_of, weights_of
from stowage.stages.freezing.dynamics import Dynamics
from stowage.stages.freezing.policies import Ils, active_count
from stowage.stages.ir.units import mask_of
from stowage.stages.trace import trace_step

RATES = (0.5, 0.9, 0.95)
ITERATIONS = 24
LEARNING_RATE = 5e-5


@dataclass(frozen=True)
class Chosen:
    """What forward saves at one freezing rate in a short run of ILS.

    Attributes:
        model: the model's label.
        rate: the freezing rate.
        iterations: how many there were, each with units of its own.
        predicted_mean_bytes, measured_mean_bytes: the mean over them of what is in memory between forward and backward.
        predicted_most_bytes, measured_most_bytes: the largest.
        off: the largest difference of what was measured and predicted, as a share of what was predicted.
        worst_bytes, last_bytes: what is predicted of the worst choice of as many units, and of the last units.
    """

    model: str
    rate: float
    iterations: int
    predicted_mean_bytes: int
    measured_mean_bytes: int
    predicted_most_bytes: int
    measured_most_bytes: int
    off: float
    worst_bytes: int
    last_bytes: int


def saved_by_ils(
    model: Frozen,
    rates: tuple[float, ...] = RATES,
    iterations: int = ITERATIONS,
    said: Callable[[str], None] = lambda text: None,
    **smaller: Any,
) -> Iterator[Chosen]:
    """Yield a row for each rate; training goes on from one rate to the next, and units begin anew.

    Args:
        model: one of `MODELS`.
        rates: the freezing rates.
        iterations: steps of AdamW at each, on drawn batches.
        said: receives what is going on.
        smaller: changes the model's configuration.
    """
    made, batch = model.make(model.batch, **smaller)
    optimizer = torch.optim.AdamW(made.parameters(), lr=LEARNING_RATE)
    ready = ReadyStep(trace_step(made, batch, optimizer=optimizer), (made, optimizer, batch))
    count, parameters = len(ready.units), dict(made.named_parameters())
    for rate in rates:
        predicted, measured = steps_of_ils(ready, parameters, batch, rate, iterations)
        said(f"{model.label}: {iterations} steps of ILS at {rate:.0%}")
        yield Chosen(
            model.label,
            rate,
            iterations,
            round(fmean(predicted)),
            round(fmean(measured)),
            max(predicted),
            max(measured),
            max(abs(m - p) / p for m, p in zip(measured, predicted, strict=True)),
            *(ready.saved.under(choose(ready.saved, count, active_count(count, rate))) for choose in (worst, last)),
        )


def steps_of_ils(
    ready: ReadyStep, parameters: Mapping[str, torch.nn.Parameter], batch: Any, rate: float, iterations: int
) -> tuple[list[int], list[int]]:
    """Take steps with the units that ILS chooses, and return the bytes that forward saves, predicted and measured.

    Args:
        ready: the step.
        parameters: the model's, by name.
        batch: a batch; each step has another one like it.
        rate: the freezing rate.
        iterations: the number of steps.
    """
    policy, dynamics = Ils(rate), Dynamics([unit.name for unit in ready.units], 0)
    predicted, measured = list[int](), list[int]()
    for iteration in range(iterations):
        chosen = set(policy.choose(iteration, dynamics.all()))
        mask = mask_of(ready.units, chosen)
        before = weights_of(ready.units, chosen, parameters)
        measured.append(ready.measured(mask, another(batch, iteration)))
        predicted.append(ready.saved.under(mask))
        dynamics.moved(distances_of(before, parameters, "l1"))
    return predicted, measured
