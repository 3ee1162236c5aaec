"""Trains as one rank of one contestant: `python -m stowage.flows.benchmarks.gpu.ranks.contestant`, by `training`.

Rank 0 writes what was found, and the trained weights.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from stowage.flows.benchmarks.gpu.job import GpuJob, strictly
from stowage.stages.device import device_of, unique_bytes
from stowage.stages.ir.command import run_stage
from stowage.stages.ir.errors import Infeasible, StowageError
from stowage.stages.ir.files import write_atomically
from stowage.stages.runtime.files.tensor_file import Entry, write_tensors
from stowage.stages.train.launch import obey
from stowage.stages.workload.models import build_model

REQUEST = "STOWAGE_RANKS_REQUEST"
"""Environment variable with the file of what is asked."""

PATIENCE = timedelta(minutes=5)
WARM = 2
"""Iterations before the timed ones: states are made in the first, and buckets are arranged."""

REFUSED = "could not plan: Infeasible"
"""Words of the error that the other ranks raise where rank 0 finds that nothing fits."""

Whole = dict[str, torch.Tensor]


class Contestant:
    """A way to train on several ranks.

    Attributes:
        step: runs one iteration on a batch, and returns the loss.
        whole: returns all weights, whole; all ranks call it.
        resident: returns the bytes that are in memory between steps.
        about: a line for people.
        predicted_bytes: the peak of a rank that its plan predicts; None without a plan.
    """

    def __init__(
        self,
        step: Callable[[Any], torch.Tensor],
        whole: Callable[[], Whole],
        resident: Callable[[], int],
        about: str = "",
        predicted_bytes: int | None = None,
    ) -> None:
        self.step = step
        self.whole = whole
        self.resident = resident
        self.about = about
        self.predicted_bytes = predicted_bytes


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _resident(model: nn.Module, optimizer: torch.optim.Optimizer, besides: int = 0) -> int:
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return unique_bytes([*map(_local, [*model.parameters(), *states]), *model.buffers()]) + besides


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], torch.Tensor]:
    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp(job: GpuJob, model: nn.Module, asked: dict[str, Any]) -> Contestant:
    """Make plain PyTorch's DistributedDataParallel."""
    ids = [torch.cuda.current_device()] if job.device == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids)
    optimizer = job.make_optimizer(model.parameters())
    buckets = sum(p.numel() * p.element_size() for p in model.parameters())
    return Contestant(
        _eager(wrapped, optimizer),
        lambda: {name: p.detach() for name, p in model.named_parameters()},
        lambda: _resident(model, optimizer, buckets),
    )


def fsdp2(job: GpuJob, model: nn.Module, asked: dict[str, Any]) -> Contestant:
    """Make plain PyTorch's `fully_shard`, block by block.

    Where asked, blocks are checkpointed, shards offloaded, or so many blocks gathered ahead.
    """
    _checkpointed(model, asked)
    how: dict[str, Any] = {"reshard_after_forward": bool(asked["reshard"])}
    if asked.get("offloaded"):
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=job.device == "cuda")
    blocks = blocks_of(model)
    for block in blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    _prefetch(blocks, int(asked.get("prefetch", 0)))
    return _on_shards(job, model, job.make_optimizer(model.parameters()))


def sharded(job: GpuJob, model: nn.Module, asked: dict[str, Any]) -> Contestant:
    """Make FSDP2 as `shard` applies it: each group of parameters in the state of the fastest choice that fits.

    Raises:
        StowageError: nothing fits the budget, which rank 0 raises as `Infeasible`.
    """
    from stowage.flows.api.shard import shard

    _checkpointed(model, asked)
    optimizer = job.make_optimizer(model.parameters())
    plan = shard(
        model,
        batch_of(job, 0),
        optimizer,
        device_budget=int(asked["budget_bytes"]),
        host_budget=_host_bytes(job, asked),
        group=dist.group.WORLD,
        cache_dir=_stores(asked),
    )
    on_host = sum(choice.on_host for choice in plan.choices)
    kept = sum(choice.keep for choice in plan.choices)
    about = f"of {len(plan.choices)} groups {on_host} in the host, {kept} kept, by {plan.chosen_by}"
    return _on_shards(job, model, optimizer, about, plan.predicted_peak_bytes)


def _on_shards(
    job: GpuJob, model: nn.Module, optimizer: torch.optim.Optimizer, about: str = "", predicted: int | None = None
) -> Contestant:
    """Make the contestant of a model that `fully_shard` has dealt out."""

    def whole() -> Whole:
        found = {name: p.detach() for name, p in model.named_parameters()}
        return {name: _gathered(job, p) for name, p in found.items()}

    return Contestant(_eager(model, optimizer), whole, lambda: _resident(model, optimizer), about, predicted)


def _checkpointed(model: nn.Module, asked: dict[str, Any]) -> None:
    if asked.get("checkpointed"):
        cast(Any, model).gradient_checkpointing_enable({"use_reentrant": False})


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that people wrap: the members of lists that are in no other list, in order."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return [block for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists) for block in m]


def _prefetch(blocks: list[nn.Module], ahead: int) -> None:
    """Let each block gather so many of the next ones while it computes; without, PyTorch has a way of its own."""
    if not ahead:
        return
    of_fsdp = [cast(FSDPModule, block) for block in blocks]
    for number, block in enumerate(of_fsdp):
        block.set_modules_to_forward_prefetch(of_fsdp[number + 1 : number + 1 + ahead])
        block.set_modules_to_backward_prefetch(of_fsdp[max(0, number - ahead) : number][::-1])


def _gathered(job: GpuJob, parameter: torch.Tensor) -> torch.Tensor:
    """Return a whole parameter; NCCL gathers no shards that are in the host."""
    return cast(DTensor, parameter.to(job.device)).full_tensor() if isinstance(parameter, DTensor) else parameter


def planned(job: GpuJob, model: nn.Module, asked: dict[str, Any]) -> Contestant:
    """Make the model's step under one plan for shards, activations and updates."""
    from stowage.flows.api.fit import fit

    optimizer = job.make_optimizer(model.parameters())
    step = fit(
        model,
        batch_of(job, 0),
        optimizer,
        device_budget=int(asked["budget_bytes"]),
        host_budget=share_of_host(_host_bytes(job, asked)),
        group=dist.group.WORLD,
        quick=bool(asked["quick"]),
        cache_dir=_stores(asked),
        check="never",  # the plan is timed without checks
        say=lambda text: None,
    )
    contents = step.contents()

    def whole() -> Whole:
        found: Whole = {}
        for name, parameter in model.named_parameters():
            contents.lend(parameter, lambda content, name=name: found.update({name: content.clone()}))  # type: ignore[misc]
        return found

    def resident() -> int:
        program = step.prepare(batch_of(job, 0))
        return _resident(model, optimizer) + unique_bytes(program.resident()) + program.staging_bytes

    about = " ".join(repr(step.plan).split())[1:-1]
    return Contestant(step, whole, resident, about, step.plan.device_peak_bytes)


def _stores(asked: dict[str, Any]) -> Path:
    return Path(asked["stores"]) / f"rank-{dist.get_rank()}"


def _host_bytes(job: GpuJob, asked: dict[str, Any]) -> int | None:
    """Return what all ranks may use of the host; None on a CPU, where the host is the device."""
    return int(asked["host_bytes"]) if job.device == "cuda" else None


def share_of_host(host_bytes: int | None) -> int | None:
    """Return a rank's part of it: each rank plans with memory of its own."""
    return host_bytes // dist.get_world_size() if host_bytes is not None else None


CONTESTANTS: dict[str, Callable[[GpuJob, nn.Module, dict[str, Any]], Contestant]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "planned": planned,
    "sharded": sharded,
}

KEEP_THEIR_PROMISE = ("planned", "sharded")
"""Contestants whose peak is promised for every iteration."""


def batch_of(job: GpuJob, iteration: int) -> dict[str, torch.Tensor]:
    """Return this rank's batch of an iteration."""
    return job.batch(iteration * dist.get_world_size() + dist.get_rank())


def _peak(job: GpuJob, contestant: Contestant, batch: Any) -> tuple[torch.Tensor, int]:
    """Run one iteration; return its loss, and the bytes on this rank's device at its peak."""
    if job.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = contestant.step(batch)
        torch.cuda.synchronize()
        return loss, torch.cuda.max_memory_allocated()
    resident = contestant.resident() + unique_bytes(list(batch.values()))
    found = device_of("cpu").measure(lambda: contestant.step(batch), list(batch.values()))
    return found.result, resident + found.peak_bytes


def main() -> None:
    """Train a few iterations, and let rank 0 write what was found."""
    obey()
    asked = json.loads(Path(os.environ[REQUEST]).read_text())
    job = GpuJob(**asked["job"])
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo", timeout=PATIENCE)
    try:
        with strictly(job.device == "cuda"):
            _train(job, asked)
    finally:
        dist.destroy_process_group()


def _train(job: GpuJob, asked: dict[str, Any]) -> None:
    model = build_model(job.architecture, job.overrides, seed=job.seed).to(job.device).train()
    try:
        contestant = CONTESTANTS[asked["contestant"]](job, model, asked)
    except StowageError as error:  # on all ranks
        refused = isinstance(error, Infeasible) or REFUSED in str(error)
        if asked["contestant"] != "sharded" or not refused:
            raise
        if isinstance(error, Infeasible):
            _write(asked, {"refused": str(error), "needed_bytes": error.smallest_feasible_bytes})
        return
    found, whole = trained(job, asked, contestant)
    if dist.get_rank() == 0:
        if "weights" in asked:
            write_tensors(Path(asked["weights"]), [_entry(name, tensor) for name, tensor in whole.items()])
        _write(asked, found)
    dist.barrier()


def trained(job: GpuJob, asked: dict[str, Any], contestant: Contestant) -> tuple[dict[str, Any], Whole]:
    """Train a few iterations; return what all ranks have found, and the whole weights."""
    torch.manual_seed(job.seed + dist.get_rank())
    losses, seconds, peaks = [], [], []
    for iteration in range(WARM + asked["steps"] + 2):
        batch = batch_of(job, iteration)
        if iteration >= WARM + asked["steps"]:
            loss, peak = _peak(job, contestant, batch)
            peaks.append(peak)
            losses.append(float(loss))
            continue
        dist.barrier()
        began = time.perf_counter()
        losses.append(float(contestant.step(batch)))
        if iteration >= WARM:
            seconds.append(time.perf_counter() - began)
    # A plan keeps its promise in every iteration. Others do not wait until gloo's threads have released what they sent,
    # and their lesser peak, which may be a plan's budget, is without that.
    peak = max(peaks) if asked["contestant"] in KEEP_THEIR_PROMISE else min(peaks)
    own = {"losses": losses, "seconds": seconds, "peak_bytes": peak}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    slowest = [max(of_step) for of_step in zip(*(found["seconds"] for found in of_ranks), strict=True)]
    found = {
        "losses": [found["losses"] for found in of_ranks],
        "seconds": slowest,
        "step_s": statistics.median(slowest),
        "peak_bytes": max(found["peak_bytes"] for found in of_ranks),
        "about": contestant.about,
        "predicted_bytes": contestant.predicted_bytes,
    }
    return found, contestant.whole()


def _write(asked: dict[str, Any], found: dict[str, Any]) -> None:
    write_atomically(Path(asked["found"]), json.dumps(found).encode())


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    return Entry(name, tensor, lambda use: use(tensor))


if __name__ == "__main__":
    run_stage(main)
