"""Measures or estimates the cost of every distinct call of a trace on a device.

- `variants`: the costs of several traces, from the store where they are known.
- `store`: the store of costs.
- `timing`: times calls together, in turns.
- `windows`: chooses runs of consecutive calls in which calls are timed.
- `sequence`: runs such a window on made-up tensors.
- `line`: one call of a window.
- `written`: the calls of a window as one Python function.
- `samples`: from timed executions to times.
- `measure`: runs one call by itself and measures its memory.
- `updates`: measures updates of the optimizer.
- `clip`: measures clipping.
- `collectives`: costs of collectives, from the rates among the ranks.
- `estimates`, `similar`, `roofline`: costs of calls that are not timed.
- `arguments`, `indices`: made-up arguments of calls.
- `comparison`, `returned`: compares what calls return with the trace.
"""

from stowage.stages.profile.estimates import estimated_costs, times_are_known
from stowage.stages.profile.similar import Similar
from stowage.stages.profile.store import CostStore
from stowage.stages.profile.variants import profile_trace, profile_variants

__all__ = ["CostStore", "Similar", "estimated_costs", "profile_trace", "profile_variants", "times_are_known"]
