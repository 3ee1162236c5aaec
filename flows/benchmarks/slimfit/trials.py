"""Trains one task once under one policy, with plain PyTorch: what is frozen does not require gradients.

A plan that freezes gives the same numbers, bit for bit (`tests/freezing`), so that accuracy needs no plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.benchmarks.slimfit.coded import Choice, CodedStep, chosen_codes, made_by
from stowage.flows.benchmarks.slimfit.pretraining import SEED, optimizer_of, pretrained
from stowage.flows.benchmarks.slimfit.tasks import TASKS, Task, accuracy
from stowage.stages.freezing.dynamics import Dynamics
from stowage.stages.freezing.policies import Policy, Progressive, policy_named
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.freezable import Distance, UnitKind
from stowage.stages.ir.lossy import Lossy
from stowage.stages.ir.units import Unit
from stowage.stages.trace import trace_step
from stowage.stages.workload.randomness import seeded

BASELINE = "all train"

MEASURED = 4
"""Batches on which the errors of codes are measured."""


@dataclass(frozen=True)
class Trial:
    """One training run.

    Attributes:
        task: what is trained.
        policy: which units are frozen: a name of `POLICIES`, or `BASELINE`.
        rate: the freezing rate F.
        seed: seed of the head, of the batches, of dropout and of the policy.
        units: how parameters are grouped into units.
        distance: how moves are measured.
        codes: keeps values for backward in fewer bits, as the default limit of the gradient's error allows.
    """

    task: str
    policy: str
    rate: float
    seed: int
    units: UnitKind = "saving"
    distance: Distance = "l1"
    codes: bool = False

    def key(self) -> dict[str, Any]:
        """Return what tells it from other trials; one with codes also from those of codes as they were before."""
        found = asdict(self)
        if self.codes:
            return {**found, "made_by": made_by()}
        return {name: value for name, value in found.items() if name != "codes"}


def run_trial(trial: Trial, stores: Path) -> dict[str, Any]:
    """Train, and return what was found.

    Returns:
        the trial's own columns, `accuracy` in percent on what was held out, `loss` of the last iterations, `seconds` of
        training, and `active`, the mean share of the units that trained; with codes also `kept`, what they keep, and
        `predicted_error` of the gradient.
    """
    task = TASKS[trial.task]()
    model = pretrained(task, trial.seed, stores)
    began = time.perf_counter()
    codes = _codes(trial.task, stores) if trial.codes else None
    coded = CodedStep(model, task.job.batch(trial.seed, 0), codes.variant) if codes is not None else None
    losses, active = _train(task, model, trial, coded)
    found = {
        "accuracy": accuracy(task, model),
        "loss": math.fsum(losses[-20:]) / len(losses[-20:]),
        "active": active,
        "seconds": time.perf_counter() - began,
    }
    about = {"kept": list(codes.kept), "predicted_error": codes.predicted_error} if codes is not None else {}
    return {**trial.key(), **found, **about}


@cache
def _codes(name: str, stores: Path) -> Choice:
    """Choose a task's codes by the model as it was pre-trained, for all seeds."""
    task = TASKS[name]()
    model = pretrained(task, SEED, stores)
    return chosen_codes(model, [task.job.batch(SEED, i) for i in range(MEASURED)], Lossy())


def _train(task: Task, model: nn.Module, trial: Trial, coded: CodedStep | None) -> tuple[list[float], float]:
    job = task.job
    optimizer, schedule = optimizer_of(job, model)
    parameters = dict(model.named_parameters())
    units = _units(task, model, trial) if trial.policy != BASELINE else []
    policy = _policy(trial, job.iterations) if units else None
    dynamics = Dynamics([unit.name for unit in units], trial.seed)
    losses, active = [], 0
    with seeded(trial.seed):
        for iteration in range(job.iterations):
            chosen = set(policy.choose(iteration, dynamics.all())) if policy else set()
            frozen = {name for unit in units if unit.name not in chosen for name in unit.parameters}
            for name, parameter in parameters.items():
                parameter.requires_grad_(name not in frozen)
            optimizer.zero_grad()
            batch = job.batch(trial.seed, iteration)
            if coded is not None:
                loss = coded.run(batch)
            else:
                loss = model(**batch).loss
                if loss.requires_grad:
                    loss.backward()
            before = weights_of(units, chosen, parameters) if trial.policy == "ils" else {}
            optimizer.step()
            schedule.step()
            dynamics.moved(distances_of(before, parameters, trial.distance))
            losses.append(loss.item())
            active += len(chosen)
    return losses, active / (len(units) * job.iterations) if units else 1.0


def _units(task: Task, model: nn.Module, trial: Trial) -> Sequence[Unit]:
    return units_of(trace_step(model, task.job.batch(trial.seed, 0)), trial.units)


def _policy(trial: Trial, iterations: int) -> Policy:
    if trial.policy == "progressive":
        return Progressive(trial.rate, over=iterations // 2)
    return policy_named(trial.policy, trial.rate, trial.seed)


Weights = dict[str, list[tuple[str, torch.Tensor]]]


def weights_of(units: Sequence[Unit], chosen: set[str], parameters: Mapping[str, nn.Parameter]) -> Weights:
    """Return copies of the weights of the units that were chosen."""
    return {
        unit.name: [(name, parameters[name].detach().clone()) for name in unit.parameters]
        for unit in units
        if unit.name in chosen
    }


def distances_of(before: Weights, parameters: Mapping[str, nn.Parameter], distance: Distance) -> dict[str, float]:
    """Return how far each unit moved from the weights that it had before."""
    found = {}
    for unit, kept in before.items():
        pairs = [(old.flatten(), parameters[name].detach().flatten()) for name, old in kept]
        old, new = (torch.cat(list(tensors)) for tensors in zip(*pairs, strict=True))
        if distance == "l1":
            found[unit] = float((new - old).abs().sum() / old.abs().sum().clamp_min(1e-30))
        else:
            found[unit] = float(((new - old) / old.where(old != 0, 1e-30)).abs().mean())
    return found
