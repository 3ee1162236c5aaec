"""What the program of cuts with transfers says of one plan: its variables have their values in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from stowage.stages.formulations.cuts.transfers.model import TransferModel
from stowage.stages.ir.actions import ACTIONS
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import Storage
from stowage.stages.simulate.copies import Copies
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.simulate.timing import Timing

TOLERANCE = 1e-6
"""Relative tolerance of times: sums are added up in another order, and solvers refuse what is wrong by rounding."""

REPEATED = 12
"""Steps whose mean time is taken: in one of them copies may get ahead of what is to be copied in the others."""


def mean_times(
    storages: Sequence[Storage],
    nodes: Sequence[ComputeNode],
    steps: Sequence[Step],
    state: TierState,
    tier: ReplayedTier,
    cuts: Sequence[int],
) -> list[float]:
    """When the first runs of the cuts end, and the time of a whole step, when one follows another for long."""
    copies = Copies(tier.link, tier.disk)
    many = list(steps) * REPEATED
    timing = Timing(storages, nodes, many, copies, state, tier.cpu_update_s)
    last = max(k for k, s in enumerate(steps) if not ACTIONS[s.kind].beside and not ACTIONS[s.kind].transfers)
    first = {s.node: k for k, s in reversed(list(enumerate(steps))) if s.kind == "compute"}
    found = [0.0] * (len(cuts) + 1)
    began = 0.0
    for repeat in range(REPEATED):
        times = timing.times[repeat * len(steps) : (repeat + 1) * len(steps)]
        for j, row in enumerate([*(first[g] for g in cuts), last]):
            found[j] += (times[row][1] - began) / REPEATED
        began = times[last][1]
    return found


def fix(model: TransferModel, steps: Sequence[Step], state: TierState, times: Sequence[float]) -> None:
    """Set the decisions of a model to those of a plan; what has been sent by a cut is left to the solver.

    Args:
        model: the model.
        steps: the rows of the plan.
        state: where everything is when the step begins.
        times: when the first runs of the cuts end, and the step.
    """
    lasting = (model.below.lasting | model.step.waiting) - state.offloaded
    live, interval = set(lasting), 0
    at_cuts = [set(live)]
    runs: Counter[tuple[int, int]] = Counter()
    comes: dict[tuple[int, int], str] = {}
    moved: Counter[tuple[str, int]] = Counter(
        (s.kind, s.storage) for s in steps if s.kind in ("reload", "offload", "update")
    )
    for row in steps:
        if row.kind in ("compute", "gather", "scatter"):
            runs[row.node, interval] += 1
            for s in model.step.nodes[row.node].creates:
                comes.setdefault((s, interval), "made")
            live.update(model.step.nodes[row.node].creates)
            if interval < len(model.cuts) and row.node == model.cuts[interval]:
                at_cuts.append(set(live))
                interval += 1
        elif row.kind == "free":
            live.discard(row.storage)
        elif row.kind == "reload":
            comes.setdefault((row.storage, interval), "reload")
            live.add(row.storage)
    updated = {s.node for s in steps if s.kind == "update"}
    for (node, i), variable in model.run.items():
        _set(variable, int(runs[node, i] > 0))
    for (value, j), variable in model.kept.items():
        _set(variable, int(value in at_cuts[j]))
    for (p, j), variable in model.there.items():
        _set(variable, int(p in at_cuts[j]))
    for s, variable in model.start.items():
        _set(variable, int(s in at_cuts[0]))
    for (x, i), variable in model.up.items():
        _set(variable, int(x not in at_cuts[i] and comes.get((x, i)) == "reload"))
    for p, variable in model.down.items():
        _set(variable, min(1, moved["offload", p]))
    for u, variable in model.cpu.items():
        _set(variable, int(u in updated))
    for p, variable in model.reloads.items():
        _set(variable, moved["reload", p])
    for variable, at in zip(model.clock[1:], times, strict=True):
        _set(variable, at * (1 + TOLERANCE) / model.time_unit_s)


def _set(variable: Any, value: float) -> None:
    variable.lowBound = variable.upBound = value
