"""Makes plans by Belady's rule: what is needed last is offloaded first.

- `belady`: decides what is offloaded, and when.
- `rows`: writes the plan.
- `late_updates`: which updates the CPU takes.
"""
