"""Train under a plan that just fits. On a GPU the process is held to a limit of which the plan and what libraries keep
take 95%, as in the comparison with peers."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from stowage.flows.planning.by_rules import RulePlan, Rules
from stowage.stages.device import unique_bytes
from stowage.stages.device.peaks import Peaks
from stowage.stages.device.tiers import PinnedTier
from stowage.stages.runtime.observe.measure import measure_program
from tests.device.tiers.thread_lanes import ThreadLanes
from tests.gpu.cases import Case
from tests.gpu.profiling import profile
from tests.gpu.side_by_side import SEED, STEPS, Planned

SHARE = 0.95
"""Of the limit."""


@dataclass(frozen=True)
class Held:
    """What a training within a budget has taken, bytes of libraries aside.

    Attributes:
        losses: of its steps.
        keep_all_bytes: predicted peak of a plan that moves nothing.
        budget_bytes: predicted peak of the plan.
        absent: tensors that are offloaded between iterations: one number in the device's memory stands for each.
        unread_bytes: of buffers that no call reads: the trace does not know them.
        peak_bytes: highest bytes that tensors asked for.
        allocated_bytes: of the allocator's blocks for them; -1 on the CPU, and so the following.
        retries, out_of_memory: see `AllocatorPeaks`.
    """

    losses: list[float]
    keep_all_bytes: int
    budget_bytes: int
    absent: int
    unread_bytes: int
    peak_bytes: int
    allocated_bytes: int = -1
    retries: int = -1
    out_of_memory: int = -1


def _plan(one: Rules) -> RulePlan:
    return one.stream_all(ahead=1, lag=0)


def train_within(case: Case, folder: Path) -> Held:
    """Profile, plan, train. The limit stays for the rest of the process."""
    found = profile(case, folder)
    one = Rules(found.trace, found.costs)
    budget, most = one.judge(_plan(one)).peak_bytes, one.judge(one.keep_all()).peak_bytes
    absent = len(_plan(one).start.offloaded)
    unread = unique_bytes(list(case.build()[0].buffers()))
    unread -= sum(s.nbytes for s in one.trace.storages if s.role == "buffer")
    torch.manual_seed(SEED)
    if not case.on_gpu:
        training = Planned(case, _plan, PinnedTier("cpu", lanes=ThreadLanes()), of=lambda case, number: one)
        losses = [loss for _ in range(STEPS) for loss in training.step()]
        measured = measure_program(
            training.programs[0], training.model, training.optimizer, training.batches[0]
        ).peak_bytes
        return Held(losses, most, budget, absent, unread, measured)
    _empty()
    before, reserved = torch.cuda.memory_stats(), torch.cuda.memory_reserved()
    training = Planned(case, _plan, PinnedTier("cuda"), of=lambda case, number: one)
    training.programs[0].enter()  # the whole model was on the device until now
    _empty()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (reserved + budget) / SHARE / total))
    peaks = Peaks(torch.device("cuda", 0))
    losses = [loss for _ in range(STEPS) for loss in training.step()]
    after = peaks.now()
    assert after is not None
    return Held(
        losses,
        most,
        budget,
        absent,
        unread,
        after.requested_bytes - before["requested_bytes.all.current"],
        after.allocated_bytes - before["allocated_bytes.all.current"],
        after.retries,
        after.out_of_memory,
    )


def _empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()
