"""Trains on all cards in steps that a second call does not repeat, and writes one page after each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
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


def job_of_ranks(
    device: str, overrides: Mapping[str, Any] | None = None, batch: int | None = None, length: int | None = None
) -> GpuJob:
    """Return GPT-2 small with its dropout; on a CPU one of two narrow layers.

    Args:
        device: `cuda` or `cpu`.
        overrides: changes of its configuration.
        batch: samples of each rank, if not the default.
        length: tokens of a sample, if not the default.
    """
    small = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 256}
    given = {"vocab_size": 256} if device == "cuda" else small
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    default_batch, default_length = (8, 1024) if device == "cuda" else (2, 32)
    length = length or default_length
    changed = {**given, **ids, **(overrides or {})}
    if changed.get("n_positions", length) < length:
        changed["n_positions"] = length
    return GpuJob("gpt2", changed, batch or default_batch, length, "float32", device, 0, 0)


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


def steps_of_ranks(job: GpuJob, ranks: int, out: Path, steps: int, quick: bool) -> list[CommandStep]:
    """Return all steps in order."""
    shared: dict[str, Any] = {"device": job.device, "ranks": ranks, "folder": str(out / FOUND)}
    training = {**shared, "job": asdict(job), "steps": steps, "quick": quick, "kind": "ranks-train"}

    def contestant(name: str, about: str, after: tuple[str, ...] = (), **asked: Any) -> CommandStep:
        return CommandStep(name, about, 900.0, {**training, "name": name, **asked}, after=after)

    def planned(of: str, about: str, fraction: float = 1.0) -> CommandStep:
        return contestant(f"planned-{of}", about, (of,), contestant="planned", budget_of=of, fraction=fraction)

    fsdp2: dict[str, tuple[str, dict[str, Any]]] = {
        "fsdp2": ("", {"reshard": True}),
        "fsdp2-kept": (" with weights kept", {"reshard": False}),
        "fsdp2-checkpointed": (" with checkpointed blocks", {"reshard": True, "checkpointed": True}),
    }
    if job.device == "cuda":  # on a CPU the host is the device
        fsdp2["fsdp2-offloaded"] = (" with shards in the host", {"reshard": True, "offloaded": True})
    found = [
        CommandStep("rates", "what gathers take among the ranks", 240.0, {**shared, "kind": "ranks-rates"}),
        contestant("ddp", "DistributedDataParallel", contestant="ddp"),
        *(contestant(name, f"FSDP2{text}", contestant="fsdp2", **how) for name, (text, how) in fsdp2.items()),
        *(planned(name, f"one plan, at the peak of FSDP2{text}") for name, (text, _) in fsdp2.items()),
        planned("ddp", "one plan, at 60% of DDP's peak", 0.6),
    ]
    names = [step.name for step in found if step.name not in ("rates", "ddp")]
    asked = {**shared, "kind": "ranks-compare", "names": names}
    compared = CommandStep("compare", "losses and weights against DDP's", 240.0, asked, after=("ddp", *names))
    return [*found, compared]


def run_ranks(
    out: Path,
    job: GpuJob,
    ranks: int,
    say: Callable[[str], None],
    *,
    steps: int,
    quick: bool,
    budget_s: float,
    again: Collection[str] = (),
    only: Collection[str] = (),
) -> dict[str, StepResult]:
    """Run what is not finished yet, and write `ranks.md` in `out` after every step.

    Args:
        out: folder of results, logs and trained weights.
        job: the model and its batches, on `cuda` or `cpu`.
        ranks: the number of ranks.
        say: receives what people should know.
        steps: timed iterations of each contestant.
        quick: plan in seconds, less well.
        budget_s: seconds for all of it; what is left is for the next call.
        again: names of steps to repeat; `fell` stands for those that did not hold, `all` for all.
        only: names of steps; by default all.

    Raises:
        ParameterError: there is no such step.
        StowageError: another call is at work in `out`.
    """
    device = job.device
    listed = steps_of_ranks(job, ranks, out, steps, quick)
    command = f"{Path(sys.executable).name} -m stowage.flows.gpu ranks --out {out}"
    command += "" if device == "cuda" else f" --device {device} --ranks {ranks}"

    def show(results: Mapping[str, StepResult]) -> None:
        write_atomically(out / PAGE, page_of(listed, results, job.name(), ranks, device, command).encode())

    return Runner(listed, out / "steps", say, show).run(budget_s, again=again, only=only)
