"""Makes plans that use the lower tier.

- `tier`: the lower tier as planning sees it; `limits` makes it of what people set.
- `offloader`: what may be offloaded, and plans from decisions for each step of the cycle.
- `sources`: which makers of plans are asked.
- `offmate/`: OffMate, whose decisions are O-ILP's.
- `belady/`: plans by Belady's rule.
- `streaming`: a fixed policy that offloads everything.
- `insertion`: puts transfers among computations.
- `hiding/`: hides transfers behind computing.
- `placements`: chooses between host and disk.
- `cpu_updates`: times of updates by the CPU.
"""
