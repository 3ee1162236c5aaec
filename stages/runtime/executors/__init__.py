"""Executes plans.

- `verbs`: what a generated step sees and calls, whatever executes it.
- `base`: the interface of an executor, and the plan that it is given.
- `single`: executes on one device, with its lower tier.
- `sharded`: executes on one of several ranks.
- `iteration`: the verbs on one device.
"""
