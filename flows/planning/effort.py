"""Limits the time that planning may take, and finds the folder of its stores."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import torch

from stowage.stages.device import device_of
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.defaults import (
    CUT_SECONDS,
    EVICTION_RULES,
    MEMORY_SLOTS,
    MIN_SAMPLES,
    O_ILP_GAP,
    O_ILP_SEARCHES,
    O_ILP_SECONDS,
    SECONDS_PER_CALL,
    SOLVE_SECONDS,
)
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.table import read_record, write_record
from stowage.stages.options.tasks import GridSize
from stowage.stages.solver.highs_process import end_process
from stowage.stages.solver.outcome import SolverSettings


@dataclass(frozen=True)
class Effort:
    """Limits on the time that planning may take.

    Attributes:
        seconds_per_call: seconds to measure one distinct operation.
        min_samples: samples of one distinct operation at least.
        grid: budgets per distinct block.
        solver: limits of one solve for a block.
        o_ilp: limits of one solve of O-ILP, which decides what is offloaded.
        o_ilp_searches, eviction_rules: see `PlanRequest`.
        slots: memory slots of RK-Rotor.
        cut_seconds: see `PlanRequest`; for the plan that is run, not for those that a search looks at.
        rules_suffice: blocks are not solved where fixed policies, rules and the lower tier alone give a plan that is
            slower than the lower bound by this factor at most; 0 to solve them always.
        few_blocks: where there is a lower tier, so many distinct blocks at most are solved at once: that takes less
            time than to decide twice what is offloaded.
    """

    seconds_per_call: float = SECONDS_PER_CALL
    min_samples: int = MIN_SAMPLES
    grid: GridSize = field(default_factory=GridSize)
    solver: SolverSettings = field(default_factory=lambda: SolverSettings(time_limit_s=SOLVE_SECONDS))
    o_ilp: SolverSettings = field(default_factory=lambda: SolverSettings(O_ILP_SECONDS, O_ILP_GAP))
    o_ilp_searches: int = O_ILP_SEARCHES
    eviction_rules: int = EVICTION_RULES
    slots: int = MEMORY_SLOTS
    cut_seconds: float = CUT_SECONDS
    rules_suffice: float = 0.0
    few_blocks: int = 12

    def rules_first(self, distinct_blocks: int, *, offloads: bool) -> bool:
        """Say whether plans without solved blocks are looked for first."""
        return bool(self.rules_suffice) and not (offloads and distinct_blocks <= self.few_blocks)


QUICK = Effort(
    seconds_per_call=0.01,
    min_samples=2,
    grid=GridSize(
        peak_budgets=2,
        save_budgets=2,
        computations=2,
        tiny_nodes=0,
        greedy_levels=8,
        cluster_peaks=2,
        cluster_saves=1,
        top_peaks=3,
        top_saves=1,
        cluster_options=60,
    ),
    solver=SolverSettings(time_limit_s=0.1),
    o_ilp=SolverSettings(time_limit_s=4.0, gap=0.02),
    cut_seconds=0.0,
    eviction_rules=3,
    rules_suffice=1.25,
)
"""Effort for trying out: a plan in seconds, less good."""


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended, so far; end the solver's first."""
    end_process()
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def stores_folder(cache_dir: str | Path | None) -> Path:
    """Return the folder of the stores of `fit`: the argument, `STOWAGE_HOME`, or the user's cache folder."""
    return Path(cache_dir or os.environ.get("STOWAGE_HOME") or platformdirs.user_cache_dir("stowage"))


def target_device(device_name: str | torch.device, stores: Path) -> DeviceDescription:
    """Return the description of this machine's device, measured once and remembered; `cuda` is the current GPU."""
    device = device_of(device_name)
    path = stores / "devices" / f"{device.fingerprint()}.json"
    try:
        return read_record(path, DeviceDescription)
    except TableError:
        description = device.describe(str(stores))
        write_record(path, description)
        return description
