"""Lets a machine without a GPU plan and run updates by the CPU: RAM stands for a GPU's pinned host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from stowage.flows.api import fit as fit_module
from stowage.flows.api.lower_tier import OpenableTier
from stowage.flows.benchmarks.gpu.lanes import HostLanes
from stowage.stages.device.tiers import PinnedTier
from stowage.stages.ir.machine import Link
from stowage.stages.solve import LowerTier

RATES = Link(2e9, 2e9)
UPDATED_BYTES_PER_S = 2e10
"""What plans count with; both are much as on a small machine with a GPU."""

NUMBER_BYTES = 8
"""What a number takes at most that stands for an offloaded tensor; a GPU's rounding is in the reserve of its budget."""


@contextmanager
def updates_by_the_cpu() -> Iterator[None]:
    """Let `fit` offload to RAM, and update there beside computing; threads stand for a GPU's copy engines."""
    tier = LowerTier(RATES, 1 << 40, padding_bytes=NUMBER_BYTES, cpu_update_bytes_per_s=UPDATED_BYTES_PER_S)
    opened = OpenableTier(tier, lambda: PinnedTier(lanes=HostLanes()))
    with mock.patch.object(fit_module, "lower_tier_for", return_value=opened):
        yield
