"""Reads limits of this stage's solves, and the lower tier, from `params.yaml`."""

from __future__ import annotations

from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.settings import Settings, SolveSettings
from stowage.stages.solve.offload.limits import lower_tier_of
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solver.outcome import SolverSettings


def o_ilp_limits(settings: Settings) -> SolverSettings:
    """Return time limit, gap and seed of one solve of O-ILP."""
    wanted = settings.solve
    return SolverSettings(time_limit_s=wanted.time_limit_s, gap=wanted.gap, seed=settings.options.seed)


def configured_lower_tier(target: DeviceDescription, wanted: SolveSettings) -> LowerTier | None:
    """Return the lower tier that plans for a device may use, wherever that device is.

    Raises:
        ParameterError: the parameters of the section `solve` do not fit each other or the device.
    """
    return lower_tier_of(
        target,
        host_budget=wanted.host_budget,
        disk_budget=wanted.disk_budget,
        offload_dir=wanted.offload_dir,
        method=wanted.method,
        section="solve.",
        here=False,
    )
