"""The tier below the device that `fit` may use: disk on a machine without a GPU, pinned host memory on one with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from stowage.stages.device.tiers import Tier, open_tier
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.solve import Below, tier_below


@dataclass(frozen=True)
class LowerTier:
    """What the planner needs to know of the tier, and how to open it once a plan uses it."""

    below: Below
    open: Callable[[], Tier]


def lower_tier(
    target: DeviceDescription,
    *,
    device: torch.device | None = None,
    host_budget: str | int | None,
    disk_budget: str | int | None,
    offload_dir: str | Path | None,
    method: str = "auto",
) -> LowerTier | None:
    """The tier that the arguments of `fit` allow below `device`, by default the current one of its type, or None.

    Raises:
        ParameterError: a budget does not fit the device, or is wrong.
    """
    below = tier_below(target, host_budget=host_budget, disk_budget=disk_budget, offload_dir=offload_dir, method=method)
    return LowerTier(below, partial(open_tier, device or target.type, offload_dir)) if below is not None else None
