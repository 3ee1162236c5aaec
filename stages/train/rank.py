"""Makes this process one of the ranks that train together: what each does for itself, and what rank 0 does for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.run import StepRecord
from stowage.stages.runtime.sharding.ranks import Ranks

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others, who may be writing large files."""


@dataclass(frozen=True)
class Rank:
    """This process among those that train together.

    Attributes:
        number: its own number, from 0.
        count: how many there are.
        ranks: talks to the others; None where there are none.
    """

    number: int = 0
    count: int = 1
    ranks: Ranks | None = None

    @property
    def writes(self) -> bool:
        """Return whether this process writes results and shows progress."""
        return self.number == 0

    def batches(self, batches: Callable[[int], Any]) -> Callable[[int], Any]:
        """Return this rank's share of a stream of batches: of every `count` in a row, the one with its number."""
        return lambda iteration: batches(iteration * self.count + self.number)

    def seed(self, seed: int) -> int:
        """Return the seed of this rank's generator."""
        return seed + self.number

    def agree(self, what: str, own: str) -> None:
        """Require that all ranks have the same.

        Raises:
            PlanMismatchError: one has another.
        """
        if self.ranks is None:
            return
        found = self.ranks.all(own)
        other = next((r for r, theirs in enumerate(found) if theirs != found[0]), None)
        if other is not None:
            raise PlanMismatchError(
                f"Rank {other} has another {what} than rank 0: start all ranks in the same project."
            )

    def share(self, record: StepRecord) -> StepRecord:
        """Return the record of all ranks; see `joined`."""
        return joined(self.ranks.all(record)) if self.ranks is not None else record


def joined(records: Sequence[StepRecord]) -> StepRecord:
    """Return one record of an iteration of all ranks: their mean loss, and the largest of their peaks and times."""
    if len(records) == 1:
        return records[0]
    return replace(
        records[0],
        loss=sum(r.loss for r in records) / len(records),
        time_s=max(r.time_s for r in records),
        peak_bytes=max(r.peak_bytes for r in records),
        requested_bytes=max(r.requested_bytes for r in records),
        reserved_bytes=max(r.reserved_bytes for r in records),
        retries=max(r.retries for r in records),
    )


@contextmanager
def one_of_several(device: str) -> Iterator[Rank]:
    """Let this process be the rank that `torchrun` has made it."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Rank(dist.get_rank(), dist.get_world_size(), Ranks(dist.group.WORLD))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def distributed(model: nn.Module, unused: bool) -> nn.Module:
    """Return the model as plain PyTorch trains it on several ranks."""
    ids = [torch.cuda.current_device()] if next(model.parameters()).device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, find_unused_parameters=unused)
