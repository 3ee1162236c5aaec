"""The lower tier that `fit` may use: disk on a machine without a GPU, pinned host memory on one with a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from stowage.flows.api.offload import Offload
from stowage.stages.device.tiers import Tier, open_tier
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.solve import LowerTier, lower_tier_of


@dataclass(frozen=True)
class OpenableTier:
    """The lower tier as the planner needs to know it, and the function that opens it once a plan uses it."""

    lower_tier: LowerTier
    open: Callable[[], Tier]


def lower_tier_for(
    target: DeviceDescription,
    offload: Offload,
    *,
    device: torch.device | None = None,
    method: str = "auto",
) -> OpenableTier | None:
    """Return the lower tier that `offload` allows for `device` (by default the current one of its type), or None.

    Raises:
        ParameterError: a budget does not fit the device, or is wrong.
    """
    lower_tier = lower_tier_of(
        target,
        host_budget=offload.host,
        disk_budget=offload.disk,
        offload_dir=offload.dir,
        method=method,
        names=offload.names,
    )
    return (
        OpenableTier(lower_tier, partial(open_tier, device or target.type, offload.dir))
        if lower_tier is not None
        else None
    )
