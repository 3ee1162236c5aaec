"""Takes techniques that save memory alone, in pairs and all at once, each as one plan of one fine-tuning step.

Tables 10 to 12 of the SlimFit paper have its freezing and codes beside gradient accumulation, checkpointing and LoRA.
Here each is a leave of `fit`, so that a pair is one plan and not two systems on top of each other.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.api.fit import fit
from stowage.flows.api.freeze import Freeze
from stowage.flows.api.offload import Offload
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.lossy import Lossy
from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import seeded
from stowage.stages.workload.samples import Batch, sample_batch

TECHNIQUES = ("freeze", "quantise", "prune", "recompute", "offload", "LoRA", "accumulate")

RATE = 0.75
"""The freezing rate, the paper's for GPT-2."""

SAMPLES, LENGTH, MICRO_BATCHES, RANK = 8, 128, 4, 16
SHAPE = {"n_layer": 4, "n_embd": 192, "n_head": 4, "n_positions": LENGTH, "vocab_size": 512}
QUANTISED = ("bf16", "fixed8", "int8", "int8_group", "int4_group")
"""Kinds that are allowed where values may be quantised; the limit is the default."""

PRUNED, PRUNING_ERROR = "top10", 0.5
"""The kind that prunes, and the limit where it is the only one: nine tenths of what it packs are left out."""

NO_BUDGET = 1
"""A budget of so many bytes is refused with the least that there is a plan for."""


@dataclass(frozen=True)
class PairRow:
    """What some techniques take together.

    Attributes:
        techniques: which, with `+` between them; "" for plain training.
        predicted_peak_bytes, peak_bytes: highest device bytes, with the most demanding units training.
        predicted_time_s, time_s: of an update of all samples, with units drawn anew each time; the median of some.
        plain_time_s: of plain PyTorch's update of all samples at once, in turns with the others, since a machine is not
            always equally fast.
        error: what the gradient may change by.
        kept: what is kept in fewer bits.
    """

    techniques: str
    predicted_peak_bytes: int
    peak_bytes: int
    predicted_time_s: float
    time_s: float
    plain_time_s: float
    error: float = 0.0
    kept: tuple[str, ...] = ()


def combinations(of: Collection[str] = ()) -> list[tuple[str, ...]]:
    """Return nothing, each technique, each pair, and all; of some techniques only what has one of them."""
    every = [c for count in (0, 1, 2) for c in itertools.combinations(TECHNIQUES, count)]
    return [c for c in [*every, TECHNIQUES] if not of or set(of).intersection(c)]


def measured_pairs(stores: Path, wanted: Iterable[tuple[str, ...]], updates: int = 7) -> Iterator[PairRow]:
    """Yield a row for each combination.

    Args:
        stores: folder of the stores, see `cache_dir` of `fit`.
        wanted: the combinations.
        updates: timed updates of each.
    """
    for techniques in wanted:
        with tempfile.TemporaryDirectory() as folder:
            yield _measured(_Job(frozenset(techniques), stores, Path(folder)), updates)


@dataclass
class _Masks:
    """Trains units that are drawn anew in each step, or those that are given."""

    seed: int = 0
    given: list[str] | None = None
    _drawn: random.Random = field(init=False)
    _units: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._drawn = random.Random(self.seed)

    def most_active(self, units: int) -> int:
        """Return how many of the units train."""
        return units - int(RATE * units)

    def all_in_turns(self) -> Iterator[list[str]]:
        """Yield units that train together, until each was among them; nothing where none was ever asked for."""
        units, most = self._units, max(1, self.most_active(len(self._units)))
        for begin in range(0, len(units), most):
            yield units[begin : begin + most]

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        """Return the units that train."""
        del step
        self._units = list(dynamics)
        if self.given is not None:
            return self.given
        return self._drawn.sample(list(dynamics), self.most_active(len(dynamics)))


@dataclass
class _Job:
    """One combination.

    Attributes:
        techniques: which are allowed.
        stores: see `measured_pairs`.
        folder: where tensors may be offloaded to.
    """

    techniques: frozenset[str]
    stores: Path
    folder: Path
    masks: _Masks = field(default_factory=_Masks)

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches an update has."""
        return MICRO_BATCHES if "accumulate" in self.techniques else 1

    def batch(self, model: nn.Module) -> Batch:
        """Return a micro-batch."""
        return sample_batch(getattr(model, "base_model", model), SAMPLES // self.micro_batches, LENGTH, 1)

    def model(self) -> nn.Module:
        """Return the model, with adapters if these alone train."""
        model = build_model("gpt2", SHAPE, seed=0)
        if "LoRA" not in self.techniques:
            return model
        from peft import LoraConfig, get_peft_model

        with seeded(0):
            adapters = LoraConfig(r=RANK, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
            found: nn.Module = get_peft_model(model, adapters)
        return found.train()

    def leave(self) -> dict[str, Any]:
        """Return the arguments of `fit` that allow the techniques, but for budget and method."""
        found: dict[str, Any] = {"accumulate": self.micro_batches}
        if "freeze" in self.techniques:
            found["freeze"] = Freeze(RATE, policy=self.masks)
        pruned = [PRUNED] if "prune" in self.techniques else []
        if "quantise" in self.techniques:
            found["lossy"] = Lossy([*QUANTISED, *pruned])
        elif pruned:
            found["lossy"] = Lossy(pruned, PRUNING_ERROR)
        return found

    def planned(self, budget_bytes: int, **more: Any) -> TrainingStep:
        """Plan the step within a budget."""
        model = self.model()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        return fit(
            model,
            self.batch(model),
            optimizer,
            device_budget=budget_bytes,
            cache_dir=self.stores,
            quick=True,
            check="never",
            say=lambda text: None,
            **self.leave(),
            **more,
        )

    def step(self) -> TrainingStep:
        """Return the step of the combination.

        What neither recomputes nor offloads takes the least memory. What recomputes gets half of what that has in
        memory during the step beside what is there between steps, and what offloads half of what is there between.
        """
        found = self.least(NO_BUDGET, method="keep_all")
        recomputes, offloads = "recompute" in self.techniques, "offload" in self.techniques
        if not recomputes and not offloads:
            return found
        stays = found.plan.baseline_bytes
        passes = found.plan.device_peak_bytes - stays
        budget = stays // (2 if offloads else 1) + passes // (2 if recomputes else 1)
        more: dict[str, Any] = {}
        if offloads:
            more = {"method": "auto" if recomputes else "offmate", "offload": Offload(self.folder)}
        return self.least(budget, **more)

    def least(self, budget_bytes: int, **more: Any) -> TrainingStep:
        """Plan the step within a budget, or within the least that there is a plan for."""
        try:
            return self.planned(budget_bytes, **more)
        except Infeasible as refused:
            return self.planned(refused.smallest_feasible_bytes, **more)


def _measured(job: _Job, updates: int) -> PairRow:
    step, plain = job.step(), _plain()
    batch = job.batch(step.model)

    def update() -> None:
        for number in range(job.micro_batches):
            step(batch, update=number == job.micro_batches - 1)

    times: dict[str, list[float]] = {"plan": [], "plain": []}
    for _ in range(updates + 1):
        for name, run in (("plan", update), ("plain", plain)):
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    predicted_s, predicted, measured, error, kept = 0.0, 0, 0, 0.0, dict[str, None]()
    for units in job.masks.all_in_turns():  # states of the optimizer begin with a unit's first update
        job.masks.given = units
        update()
    worst = step.plan.worst_units
    job.masks.given = worst.split(", ") if worst else None
    for number in range(job.micro_batches):
        measured = max(measured, step.measure(batch, update=number == job.micro_batches - 1).peak_bytes)
        plan = step.plan
        predicted_s, predicted = predicted_s + plan.step_time_s, max(predicted, plan.device_peak_bytes)
        error, kept = max(error, plan.gradient_error), kept | dict.fromkeys(plan.lossy)
    return PairRow(
        " + ".join(t for t in TECHNIQUES if t in job.techniques),
        predicted,
        measured,
        predicted_s,
        statistics.median(times["plan"][1:]),
        statistics.median(times["plain"][1:]),
        error,
        tuple(kept),
    )


def _plain() -> Callable[[], None]:
    """Return plain PyTorch's update of all samples."""
    model = build_model("gpt2", SHAPE, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = sample_batch(model, SAMPLES, LENGTH, 1)

    def update() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return update
