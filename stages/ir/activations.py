"""Activation budgets: what the papers' ratios are of."""

from __future__ import annotations

from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import taken_gradients


def fixed_bytes(trace: TraceTables) -> int:
    """What a device budget holds besides the activation budget, in bytes: parameters, optimizer states, and gradients
    that stay, waiting ones among them."""
    taken = taken_gradients(trace.calls)
    stay = {
        trace.values[g.gradient_value].storage
        for g in trace.gradients
        if g.gradient_value >= 0 and g.gradient_value not in taken
    }
    held = ("parameter", "state", "gradient")
    return sum(s.nbytes for s in trace.storages if s.role in held or s.storage in stay)


def device_budget(fixed: int, keep_all_peak_bytes: int, share: float) -> int:
    """The device budget, in bytes, that leaves activations a `share` of what they take when everything is kept.

    Args:
        fixed: see `fixed_bytes`.
        keep_all_peak_bytes: peak of the iteration that keeps everything.
        share: of the activation budget that it needs.
    """
    return fixed + int(share * (keep_all_peak_bytes - fixed))


def activation_share(fixed: int, keep_all_peak_bytes: int, peak_bytes: int) -> float:
    """The inverse: which share a peak leaves to activations."""
    return (peak_bytes - fixed) / (keep_all_peak_bytes - fixed)
