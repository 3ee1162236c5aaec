"""Plans one fine-tuning step with some techniques, each a leave of `fit`, and measures its peak and its time.

On several ranks the step is sharded, and timed beside DistributedDataParallel's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stowage.flows.api.fit import fit
from stowage.flows.api.freeze import Freeze
from stowage.flows.api.offload import Offload
from stowage.flows.api.training_step import TrainingStep
from stowage.flows.benchmarks.slimfit.by_the_cpu import updates_by_the_cpu
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.lossy import Lossy
from stowage.stages.ir.variant import VariantName
from stowage.stages.rewrite.lossy import CODECS
from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import seeded
from stowage.stages.workload.samples import Batch, sample_batch

TECHNIQUES = ("freeze", "quantise", "prune", "recompute", "offload", "CPU updates", "shard", "LoRA", "accumulate")

RATE = 0.75
"""The freezing rate, the paper's for GPT-2."""

SAMPLES, MICRO_BATCHES = 8, 4


@dataclass(frozen=True)
class PairSize:
    """How large the model is.

    Attributes:
        layers, width, heads, length, vocabulary: of GPT-2.
        rank: of the adapters.
        quantised: kinds that are allowed where values may be quantised; the limit is the default.
    """

    layers: int = 4
    width: int = 192
    heads: int = 4
    length: int = 128
    vocabulary: int = 512
    rank: int = 16
    quantised: tuple[str, ...] = ("bf16", "fixed8", "int8", "int8_group", "int4_group")

    def model(self) -> nn.Module:
        """Return the model."""
        shape = {"n_layer": self.layers, "n_embd": self.width, "n_head": self.heads}
        return build_model("gpt2", {**shape, "n_positions": self.length, "vocab_size": self.vocabulary}, seed=0)


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
        recomputed_bytes: results that are computed again.
        offloaded_bytes: most bytes in the lower tier.
        updated_bytes: parameters that the CPU updates.
        coded: how many tensors are kept in codes.
    """

    techniques: str
    predicted_peak_bytes: int
    peak_bytes: int
    predicted_time_s: float
    time_s: float
    plain_time_s: float
    error: float = 0.0
    kept: tuple[str, ...] = ()
    recomputed_bytes: int = 0
    offloaded_bytes: int = 0
    updated_bytes: int = 0
    coded: int = 0


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
        """Yield units that train together, until each was among them; nothing where none was ever asked for.

        Of several ranks the first is asked, for all.
        """
        asked = [self._units]
        if dist.is_initialized():
            dist.broadcast_object_list(asked)
        units, most = asked[0], max(1, self.most_active(len(asked[0])))
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
class PairJob:
    """One combination.

    Attributes:
        techniques: which are allowed.
        stores: folder of the stores, see `cache_dir` of `fit`.
        folder: where tensors may be offloaded to.
        size: how large the model is.
    """

    techniques: frozenset[str]
    stores: Path
    folder: Path
    size: PairSize = PairSize()
    masks: _Masks = field(default_factory=_Masks)

    @property
    def sharded(self) -> bool:
        """Return whether this process is to be one of several ranks."""
        return "shard" in self.techniques

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches an update has."""
        return MICRO_BATCHES if "accumulate" in self.techniques else 1

    def batch(self, model: nn.Module) -> Batch:
        """Return a micro-batch."""
        return sample_batch(
            getattr(model, "base_model", model), SAMPLES // self.micro_batches, self.size.length, _seed()
        )

    def model(self) -> nn.Module:
        """Return the model, with adapters if these alone train."""
        model = self.size.model()
        if "LoRA" not in self.techniques:
            return model
        from peft import LoraConfig, get_peft_model

        with seeded(0):
            adapters = LoraConfig(r=self.size.rank, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
            found: nn.Module = get_peft_model(model, adapters)
        return found.train()

    def leave(self) -> dict[str, Any]:
        """Return the arguments of `fit` that allow the techniques, but for budget and method."""
        found: dict[str, Any] = {"accumulate": self.micro_batches}
        if self.sharded:
            found["group"] = dist.group.WORLD
        if "freeze" in self.techniques:
            found["freeze"] = Freeze(RATE, policy=self.masks)
        pruned = [PRUNED] if "prune" in self.techniques else []
        if "quantise" in self.techniques:
            found["lossy"] = Lossy([*self.size.quantised, *pruned])
        elif pruned:
            found["lossy"] = Lossy(pruned, PRUNING_ERROR)
        return found

    def planned(self, budget_bytes: int, **more: Any) -> TrainingStep:
        """Plan the step within a budget."""
        model = self.model()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4)
        with updates_by_the_cpu() if "CPU updates" in self.techniques else nullcontext():
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
        recomputes = "recompute" in self.techniques
        offloads = not self.techniques.isdisjoint(("offload", "CPU updates"))
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


def measured(job: PairJob, updates: int) -> PairRow:
    """Plan, train and measure.

    Args:
        job: the combination.
        updates: timed updates.
    """
    step, plain = job.step(), _plain(job)
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
    recomputed, offloaded, coded = 0, 0, 0
    for units in job.masks.all_in_turns():  # states of the optimizer begin with a unit's first update
        job.masks.given = units
        update()
    job.masks.given = list(step.plan.worst_units) or None
    for number in range(job.micro_batches):
        measured = max(measured, step.measure(batch, update=number == job.micro_batches - 1).peak_bytes)
        plan = step.plan
        predicted_s, predicted = predicted_s + plan.step_time_s, max(predicted, plan.device_peak_bytes)
        error, kept = max(error, plan.gradient_error), kept | dict.fromkeys(plan.lossy)
        recomputed, offloaded = recomputed + plan.recomputed_bytes, max(offloaded, plan.lower_tier_bytes)
        coded = max(coded, coded_tensors(plan.variant))
    return PairRow(
        " + ".join(t for t in TECHNIQUES if t in job.techniques),
        predicted,
        measured,
        predicted_s,
        statistics.median(times["plan"][1:]),
        statistics.median(times["plain"][1:]),
        error,
        tuple(kept),
        recomputed,
        offloaded,
        updated_by_the_cpu(step),
        coded,
    )


def coded_tensors(variant: str) -> int:
    """Return how many tensors a variant keeps in codes."""
    return sum(len(sites or ()) for name, sites in VariantName.of(variant).parts if name in CODECS)


def updated_by_the_cpu(step: TrainingStep) -> int:
    """Return the bytes of the parameters that the CPU updates in an update of all."""
    planned = next(known.planned for known in step.programs.known if known.micro_batch.update)
    storages = planned.trace.storages
    written = {s for row in planned.rows if row.action == "update" for s in planned.nodes[row.node].mutates}
    return sum(storages[s].nbytes for s in written if storages[s].role == "parameter")


def _seed() -> int:
    """Return the number from which this rank's samples are drawn."""
    return 1 + (dist.get_rank() if dist.is_initialized() else 0)


def _plain(job: PairJob) -> Callable[[], None]:
    """Return plain PyTorch's update of all samples: of several ranks, DistributedDataParallel's."""
    model = job.size.model()
    batch = sample_batch(model, SAMPLES, job.size.length, _seed())
    trained = nn.parallel.DistributedDataParallel(model) if job.sharded else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)

    def update() -> None:
        optimizer.zero_grad()
        trained(**batch).loss.backward()
        optimizer.step()

    return update
