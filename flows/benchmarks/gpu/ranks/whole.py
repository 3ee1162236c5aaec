"""Trains on all cards in steps that a second call does not repeat, and writes one page after each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.gpu.job import GpuJob
from stowage.flows.benchmarks.gpu.ranks.page import PAGE, page_of
from stowage.flows.benchmarks.gpu.steps import CommandStep, Runner, StepResult
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.files import write_atomically

FOUND = "found"
"""Name of the folder with what each contestant found and trained."""


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 32},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
}
"""The models that ranks train, as narrow as they are on a CPU."""

IDS: dict[str, dict[str, Any]] = {"gpt2": {"bos_token_id": 0, "eos_token_id": 0}, "t5": {}}
"""Tokens that must be in a vocabulary of bytes."""


@dataclass(frozen=True)
class RanksEffort:
    """How thoroughly contestants are timed, and plans made.

    Attributes:
        steps: timed iterations of each contestant in a round.
        rounds: how often each contestant is timed, in turn with the others.
        quick: plan in seconds, less well.
    """

    steps: int
    rounds: int = 1
    quick: bool = False


def job_of_ranks(
    device: str,
    overrides: Mapping[str, Any] | None = None,
    batch: int | None = None,
    length: int | None = None,
    model: str = "gpt2",
) -> GpuJob:
    """Return GPT-2 small or T5 small with its dropout; on a CPU one of two narrow layers.

    Args:
        device: `cuda` or `cpu`.
        overrides: changes of its configuration.
        batch: samples of each rank, if not the default.
        length: tokens of a sample, if not the default.
        model: one of `SMALL`.
    """
    given = {} if device == "cuda" else SMALL[model]
    default_batch, default_length = (8, 1024) if device == "cuda" else (2, 32)
    length = length or default_length
    changed = {"vocab_size": 256, **given, **IDS[model], **(overrides or {})}
    if changed.get("n_positions", length) < length:
        changed["n_positions"] = length
    return GpuJob(model, changed, batch or default_batch, length, "float32", device, 0, 0)


def ranks_here(device: str, asked: int | None) -> int:
    """Return the number of ranks: as asked, or one for each card; on a CPU two.

    Raises:
        ParameterError: there are fewer cards, or it is a single rank.
    """
    cards = torch.cuda.device_count() if device == "cuda" else 2
    ranks = asked if asked is not None else cards
    if ranks < 2:
        raise ParameterError(f"{ranks} rank exchanges nothing: run this where there are two cards, or give --ranks 2.")
    if device == "cuda" and ranks > cards:
        raise ParameterError(f"{ranks} ranks need a card each, and there are {cards}.")
    return ranks


AHEAD = 2
"""Blocks that FSDP2 gathers ahead where it is given lists; one is what PyTorch does by itself on a card."""

FSDP2: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("", {"reshard": True}),
    "fsdp2-kept": (" with weights kept", {"reshard": False}),
    "fsdp2-checkpointed": (" with checkpointed blocks", {"reshard": True, "checkpointed": True}),
    "fsdp2-kept-checkpointed": (
        " with weights kept and checkpointed blocks",
        {"reshard": False, "checkpointed": True},
    ),
    "fsdp2-prefetch": (" with lists of blocks to gather ahead", {"reshard": True, "prefetch": AHEAD}),
}
"""What people do with `fully_shard`: a name, words that go on from `FSDP2`, and how."""

ON_CARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2-offloaded": (" with shards in the host", {"reshard": True, "offloaded": True}),
}
"""The same where the host is not the device."""

NO_BUDGETS = ("fsdp2-prefetch",)
"""Contestants at whose peak nothing is planned: that is another's, or about so."""

DDP_SHARE = 0.6
"""Share of DistributedDataParallel's peak that plans are made for too."""


def steps_of_ranks(job: GpuJob, ranks: int, out: Path, effort: RanksEffort, host_bytes: int = 0) -> list[CommandStep]:
    """Return all steps in order: each contestant once, what they trained compared, and then more rounds of them.

    Args:
        job: the model and its batches.
        ranks: the number of ranks.
        out: folder of results.
        effort: steps, rounds, and whether plans are quick.
        host_bytes: what all ranks may use of the host; on a CPU it is the device.
    """
    shared: dict[str, Any] = {"device": job.device, "ranks": ranks, "folder": str(out / FOUND)}
    training = {**shared, "job": asdict(job), "steps": effort.steps, "quick": effort.quick, "kind": "ranks-train"}
    besides = {"host_bytes": host_bytes}  # no part of what is asked, for it differs from call to call

    def contestant(name: str, about: str, after: tuple[str, ...] = (), **asked: Any) -> CommandStep:
        return CommandStep(name, about, 900.0, {**training, "name": name, **asked}, besides, after)

    def planned(of: str, where: str, checkpointed: bool, fraction: float = 1.0) -> list[CommandStep]:
        budget = {"budget_of": of, "fraction": fraction}
        how = {"checkpointed": True} if checkpointed else {}  # `shard` leaves that to people
        blocks = " and checkpointed blocks" if checkpointed else ""
        return [
            contestant(f"planned-{of}", f"one plan, {where}", (of,), contestant="planned", **budget),
            contestant(
                f"sharded-{of}", f"FSDP2 by `shard`{blocks}, {where}", (of,), contestant="sharded", **budget, **how
            ),
        ]

    fsdp2 = FSDP2 | (ON_CARDS if job.device == "cuda" else {})
    budgets = {name: of for name, of in fsdp2.items() if name not in NO_BUDGETS}
    found = [
        contestant("ddp", "DistributedDataParallel", contestant="ddp"),
        *(contestant(name, f"FSDP2{text}", contestant="fsdp2", **how) for name, (text, how) in fsdp2.items()),
    ]
    for name, (text, how) in budgets.items():
        found += planned(name, f"at the peak of FSDP2{text}", "checkpointed" in how)
    found += planned("ddp", f"at {DDP_SHARE:.0%} of DDP's peak", True, DDP_SHARE)
    names = [step.name for step in found if step.name != "ddp"]
    asked = {**shared, "kind": "ranks-compare", "names": names}
    compared = CommandStep("compare", "losses and weights against DDP's", 240.0, asked, after=("ddp", *names))
    rates = CommandStep("rates", "what gathers take among the ranks", 240.0, {**shared, "kind": "ranks-rates"})
    more = [_again(step, number) for number in range(2, effort.rounds + 1) for step in found]
    return [rates, *found, compared, *more]


def _again(step: CommandStep, number: int) -> CommandStep:
    """Return the step that times a contestant once more."""
    name = f"{step.name}-round-{number}"
    asked = {**step.asked, "name": name, "again": step.name}
    about = f"{step.about}, round {number}"
    return replace(step, name=name, about=about, asked=asked, after=(*step.after, step.name))


def run_ranks(
    out: Path,
    job: GpuJob,
    ranks: int,
    say: Callable[[str], None],
    *,
    effort: RanksEffort,
    budget_s: float,
    host_bytes: int = 0,
    again: Collection[str] = (),
    only: Collection[str] = (),
) -> dict[str, StepResult]:
    """Run what is not finished yet, and write `ranks.md` in `out` after every step.

    Args:
        out: folder of results, logs and trained weights.
        job: the model and its batches, on `cuda` or `cpu`.
        ranks: the number of ranks.
        say: receives what people should know.
        effort: steps, rounds, and whether plans are quick.
        budget_s: seconds for all of it; what is left is for the next call.
        host_bytes: what all ranks may use of the host; on a CPU it is the device.
        again: names of steps to repeat; `fell` stands for those that did not hold, `all` for all.
        only: names of steps; by default all.

    Raises:
        ParameterError: there is no such step.
        StowageError: another call is at work in `out`.
    """
    device = job.device
    listed = steps_of_ranks(job, ranks, out, effort, host_bytes)
    command = f"{Path(sys.executable).name} -m stowage.flows.gpu ranks --out {out}"
    command += "" if device == "cuda" else f" --device {device} --ranks {ranks}"
    command += (
        f" --model {job.architecture} --steps {effort.steps} --rounds {effort.rounds}" + " --quick" * effort.quick
    )

    def show(results: Mapping[str, StepResult]) -> None:
        write_atomically(out / PAGE, page_of(listed, results, job.name(), ranks, device, command).encode())

    return Runner(listed, out / "steps", say, show).run(budget_s, again=again, only=only)
