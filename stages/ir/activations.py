"""Activation budgets: the papers' percentages are shares of them."""

from __future__ import annotations

from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import taken_gradients


def fixed_bytes(trace: TraceTables) -> int:
    """Return the bytes that a device budget needs besides the activation budget.

    These are parameters, optimizer states, and gradients that stay, waiting ones among them.
    """
    taken = taken_gradients(trace.calls)
    stay = {
        trace.values[g.gradient_value].storage
        for g in trace.gradients
        if g.gradient_value >= 0 and g.gradient_value not in taken
    }
    lasting = ("parameter", "state", "gradient")
    return sum(s.nbytes for s in trace.storages if s.role in lasting or s.storage in stay)


def device_budget(fixed: int, keep_all_peak_bytes: int, share: float) -> int:
    """Return the device budget, in bytes, that gives activations a `share` of what they take when everything is kept.

    Args:
        fixed: bytes that `fixed_bytes` counts.
        keep_all_peak_bytes: peak of the iteration that keeps everything.
        share: fraction of the activation budget of that iteration.
    """
    return fixed + int(share * (keep_all_peak_bytes - fixed))


def activation_share(fixed: int, keep_all_peak_bytes: int, peak_bytes: int) -> float:
    """Return the share of the activation budget that a peak leaves to activations; the inverse of `device_budget`."""
    return (peak_bytes - fixed) / (keep_all_peak_bytes - fixed)
