"""Freezes parts of a model, step by step, within one plan that serves every choice of what trains.

- `policies`: choose which units train in a step.
- `dynamics`: keeps how much each unit moved.
- `units`: groups parameters into units.
- `descent`: finds which gradients descend from each call.
"""
