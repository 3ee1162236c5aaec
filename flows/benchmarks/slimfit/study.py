"""Runs all trials, each stored as soon as it is done, so that a run that was cut off goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.slimfit.tasks import TASKS
from stowage.flows.benchmarks.slimfit.trials import BASELINE, Trial, run_trial
from stowage.stages.freezing.policies import POLICIES
from stowage.stages.ir.files import write_atomically

RATES = (0.5, 0.75, 0.9, 0.95)
SEEDS = 5

PAPER_RATES = (0.9, 0.95)
"""Rates at which ILS is also run as the paper has it: each parameter a unit, distances by its equation (1)."""

CODED_RATES = (0.0, 0.9)
"""Rates at which the units that moved most train with codes too: SlimFit whole."""

CODED_POLICY = "ils"


def trials(tasks: Sequence[str], policies: Sequence[str], rates: Sequence[float], seeds: int) -> Iterator[Trial]:
    """Yield all trials, seed by seed, so that a study that is cut off has something of everything; codes come last."""
    for seed in range(seeds):
        for task in tasks:
            yield Trial(task, BASELINE, 0.0, seed)
            for rate in rates:
                for policy in policies:
                    yield Trial(task, policy, rate, seed)
                if "ils" in policies and rate in PAPER_RATES:
                    yield Trial(task, "ils", rate, seed, units="parameter", distance="relative")
    if CODED_POLICY in policies:
        yield from coded_trials(tasks, seeds, codes=(True,))


def coded_trials(tasks: Sequence[str], seeds: int, codes: Sequence[bool] = (False, True)) -> Iterator[Trial]:
    """Yield the trials with codes, each behind the exact one that it is compared with."""
    for rate, seed, task, coded in itertools.product(CODED_RATES, range(seeds), tasks, codes):
        yield Trial(task, CODED_POLICY if rate else BASELINE, rate, seed, codes=coded)


def run_codes(
    stores: Path, say: Callable[[str], None], tasks: Sequence[str] = (), seeds: int = SEEDS
) -> list[dict[str, Any]]:
    """Run those trials with codes, and those that they are compared with, that are not stored yet; return all rows.

    Args:
        stores: see `run_study`.
        say: see `run_study`.
        tasks: see `run_study`.
        seeds: see `run_study`.
    """
    return _run(stores, say, coded_trials(tasks or tuple(TASKS), seeds))


def run_study(
    stores: Path,
    say: Callable[[str], None],
    tasks: Sequence[str] = (),
    policies: Sequence[str] = (),
    rates: Sequence[float] = RATES,
    seeds: int = SEEDS,
) -> list[dict[str, Any]]:
    """Run what is not stored yet, and return all rows; those with codes have `codes`.

    Args:
        stores: a folder with a file for every trial, and the weights of pre-training.
        say: receives what people should know.
        tasks: names of tasks; by default all.
        policies: names of policies; by default all.
        rates: freezing rates.
        seeds: how many seeds.
    """
    return _run(stores, say, trials(tasks or tuple(TASKS), policies or tuple(POLICIES), rates, seeds))


def _run(stores: Path, say: Callable[[str], None], asked: Iterable[Trial]) -> list[dict[str, Any]]:
    rows = []
    for trial in asked:
        path = stores / "trials" / (json.dumps(trial.key()).translate({ord(c): "_" for c in '{}":, '}) + ".json")
        if not path.is_file():
            found = run_trial(trial, stores)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(found).encode())
            codes = " with codes" if trial.codes else ""
            say(f"{trial.task}, {trial.policy} {trial.rate}{codes}, seed {trial.seed}: {found['accuracy']:.1f}%")
        rows.append(json.loads(path.read_text()))
    return rows
