"""The tier below the device that `fit` may use: disk on a machine without a GPU, pinned host memory on one with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from stowage.flows.api.offload import Offload
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
    offload: Offload,
    *,
    device: torch.device | None = None,
    method: str = "auto",
) -> LowerTier | None:
    """The tier that `offload` allows below `device`, by default the current one of its type, or None.

    Raises:
        ParameterError: a budget does not fit the device, or is wrong.
    """
    below = tier_below(
        target,
        host_budget=offload.host,
        disk_budget=offload.disk,
        offload_dir=offload.dir,
        method=method,
        names=offload.names,
    )
    return LowerTier(below, partial(open_tier, device or target.type, offload.dir)) if below is not None else None
