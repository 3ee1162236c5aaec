"""What is trained on the model of a device: models of the zoo under plans made by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stowage.stages.trace import MicroBatch
from tests.offload.test_offloaded_training import OPTIMIZERS
from tests.streams.checking import Job, Piece
from tests.streams.hand_plans import HandMade, HandPlan, Way
from tests.zoo import ZOO

WAYS = {
    "weights": Way(activations=False),
    "everything": Way(),
    "at once": Way(ahead=0, lag=0),
    "around": Way(ahead=6, lag=4, around=True),
    "by the CPU": Way(cpu_updates=True),
    "by the CPU, around": Way(cpu_updates=True, around=True),
    "disk": Way(disk=2),
    "disk, by the CPU, around": Way(ahead=5, lag=3, cpu_updates=True, around=True, disk=2),
}
"""How things move."""


@cache
def hand_made(name: str, optimizer: str, micro_batch: MicroBatch) -> HandMade:
    """The tables of a model of the zoo."""
    return HandMade(ZOO[name], OPTIMIZERS[optimizer], micro_batch)


def piece_of(plan: HandPlan, *, update: bool = True) -> Piece:
    """A plan as a part of a job."""
    return Piece(plan.trace, plan.source, tuple(plan.slots), update)


@cache
def hand_job(name: str, optimizer: str, way: str, max_grad_norm: float | None = None) -> Job:
    """One step for each update; `keep` and `again` move nothing, the rest are `WAYS`."""
    made = hand_made(name, optimizer, MicroBatch(max_grad_norm=max_grad_norm))
    if way in ("keep", "again"):
        plan = made.keep_all() if way == "keep" else made.recompute_all()
    else:
        plan = made.streaming(WAYS[way])
    return Job(f"{name}, {way}", ZOO[name], OPTIMIZERS[optimizer], (piece_of(plan),), max_grad_norm)


@cache
def summed_job(name: str, optimizer: str, way: Way, max_grad_norm: float | None = None) -> Job:
    """Three micro-batches for each update."""
    model, _, _ = ZOO[name]()
    names = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    batches = (
        MicroBatch(update=False),
        MicroBatch(waiting=names, update=False),
        MicroBatch(waiting=names, max_grad_norm=max_grad_norm),
    )
    pieces = tuple(piece_of(hand_made(name, optimizer, b).streaming(way), update=b.update) for b in batches)
    return Job(f"{name}, three micro-batches", ZOO[name], OPTIMIZERS[optimizer], pieces, max_grad_norm, rounds=2)


def disk_for(job: Job, folder: Path) -> Path | None:
    """Where a job's disk is, if it has one."""
    return folder if any(slot.placement == "disk" for piece in job.pieces for slot in piece.slots) else None
