"""How plans are executed.

- `verbs`: what a generated step sees and calls, whatever executes it.
- `base`: what an executor is, and the plan that it is given.
- `single`: executes on one device, with the tier below it.
- `iteration`: the verbs on one device.
"""
