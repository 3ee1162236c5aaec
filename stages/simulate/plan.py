"""Judges a whole plan by plain replay: legality, memory and time. It shares no code with any solver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from stowage.stages.ir.actions import ACTIONS
from stowage.stages.ir.errors import STAGING, Occupant
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, TierState
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import Storage
from stowage.stages.simulate.copies import Copies
from stowage.stages.simulate.lower_tier import NO_TIER, ReplayedTier
from stowage.stages.simulate.replay import Replay, Row
from stowage.stages.simulate.timing import Timing


@dataclass(frozen=True)
class Outcome:
    """The result of a plan's replay.

    Attributes:
        untimed: the rows of the plan with predicted bytes.
        times: when each begins and ends, in seconds.
        peak_bytes: highest device bytes, everything included.
        peak_row: the row at which it is reached.
        baseline_bytes: on the device between iterations: persistent storages, and gradients that wait.
        time_s: time of one iteration when one follows another.
        once_time_s: time of all nodes executed once: a lower bound.
        recomputed_bytes: bytes of distinct activations (forward makes, backward reads) that were made more than once.
        activation_bytes: bytes of storages that forward makes and backward reads.
        occupants: what is in memory at the peak, largest first.
        lower_tier_bytes: bytes of distinct storages that were offloaded at some time.
        disk_bytes: the part of these bytes whose placement is a disk.
        offload_bytes, reload_bytes: transferred in one iteration.
        wait_s: time that computing waits for copies.
    """

    untimed: list[Row] = field(repr=False)
    times: list[tuple[float, float]] = field(repr=False)
    peak_bytes: int
    peak_row: int
    baseline_bytes: int
    time_s: float
    once_time_s: float
    recomputed_bytes: int
    activation_bytes: int
    occupants: list[Occupant]
    lower_tier_bytes: int = 0
    offload_bytes: int = 0
    reload_bytes: int = 0
    wait_s: float = 0.0
    disk_bytes: int = 0

    @cached_property
    def rows(self) -> list[PlanRow]:
        """The plan with predicted times and bytes."""
        return [row.timed(*times) for row, times in zip(self.untimed, self.times, strict=True)]


def baseline_bytes(storages: Sequence[Storage]) -> int:
    """Return the bytes of everything that is in memory before an iteration that offloads nothing."""
    return sum(s.nbytes for s in storages if s.role != "temporary")


def replay_plan(
    storages: Sequence[Storage],
    nodes: Sequence[ComputeNode],
    steps: Iterable[Step],
    *,
    keep: frozenset[int] = frozenset(),
    budget_bytes: int | None = None,
    start: TierState = EVERYTHING_ON_DEVICE,
    tier: ReplayedTier = NO_TIER,
    skipped: frozenset[int] = frozenset(),
) -> Outcome:
    """Replay a plan.

    Args:
        storages: the storages of the program.
        nodes: the compute nodes of the program.
        steps: the plan.
        keep: storages that must exist at the end, in memory or offloaded, and may be freed otherwise: temporary ones (a
            loss, gradients left in `.grad`), and gradients that were waiting and go on waiting.
        budget_bytes: reject the plan if any row exceeds it.
        start: where persistent storages are between iterations, and what is placed on a disk.
        tier: the lower tier.
        skipped: nodes that need not run: those of parameters that are frozen in this step.

    Raises:
        IllegalPlanError: at the first row that reads what is not in memory or no longer what it was, makes what is
            still in memory, loses what has no copy, touches what a copy is using, runs a run-once node again, draws
            first random numbers out of order, or exceeds the budget; or when the lower tier has no room for what is
            offloaded, nodes never ran or the end is not the start.
    """
    replay = Replay(storages, nodes, list(steps), keep, budget_bytes, start, tier.staging_bytes, skipped)
    replay.run()
    in_lower_tier, on_disk = replay.room_in_lower_tier(tier.host_room_bytes, tier.disk_room_bytes)
    timing = Timing(storages, nodes, replay.steps, Copies(tier.link, tier.disk), start, tier.cpu_update_s)
    moved = Counter[str]()
    for step in replay.steps:
        if ACTIONS[step.kind].transfers:
            moved[step.kind] += storages[step.storage].nbytes
    return Outcome(
        untimed=replay.rows,
        times=timing.times,
        peak_bytes=replay.peak,
        peak_row=replay.peak_row,
        baseline_bytes=replay.base,
        time_s=timing.period_s,
        once_time_s=sum(n.time_s for n in nodes),
        recomputed_bytes=sum(storages[s].nbytes for s in replay.again & replay.activations),
        activation_bytes=sum(storages[s].nbytes for s in replay.activations),
        occupants=_occupants(replay),
        lower_tier_bytes=in_lower_tier,
        offload_bytes=moved["offload"],
        reload_bytes=moved["reload"],
        wait_s=timing.wait_s,
        disk_bytes=on_disk,
    )


def _occupants(replay: Replay) -> list[Occupant]:
    """Return what is in memory at the peak, largest first."""
    found = [Occupant(replay.storages[s].name, replay.size[s]) for s in replay.at_peak]
    if replay.staging_bytes:
        found.append(Occupant(STAGING, replay.staging_bytes))
    node = replay.rows[replay.peak_row].node if replay.rows else -1
    if node >= 0 and replay.nodes[node].workspace_bytes:
        found.append(Occupant(f"workspace of {replay.nodes[node].name}", replay.nodes[node].workspace_bytes))
    return sorted(found, key=lambda o: (-o.nbytes, o.name))
