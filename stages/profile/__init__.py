"""Cost of every distinct call of a trace on a device."""

from stowage.stages.profile.estimates import estimated_costs, times_are_known
from stowage.stages.profile.similar import Similar
from stowage.stages.profile.store import CostStore
from stowage.stages.profile.variants import profile_trace, profile_variants

__all__ = ["CostStore", "Similar", "estimated_costs", "profile_trace", "profile_variants", "times_are_known"]
