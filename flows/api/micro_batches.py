"""Tells what micro-batch a call of a training step is, and how large a batch is."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stowage.flows.api.steps import Steps
from stowage.stages.trace import MicroBatch, Recorded


def micro_batch_of(steps: Steps, waiting: frozenset[str], *, update: bool) -> MicroBatch:
    """Return the micro-batch of a call before which the gradients of `waiting` wait, and which updates or not."""
    limit = steps.max_grad_norm if update else None
    return MicroBatch(waiting, update, limit, steps.ranks, units=steps.units if steps.ranks > 1 else None)


def with_gradient(recorded: Recorded) -> frozenset[str]:
    """Return the names of the parameters that get a gradient."""
    return frozenset(g.parameter for g in recorded.gradients if g.gradient_value >= 0)


def place_text(micro_batch: MicroBatch) -> str:
    """Say where in an update a micro-batch is."""
    ends = "updates" if micro_batch.update else "does not update"
    return f"{len(micro_batch.waiting)} gradients wait, and it {ends}"


def bytes_of(batch: Any) -> int:
    """Return the bytes of a batch's tensors."""
    return sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor))
