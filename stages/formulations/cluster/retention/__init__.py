"""Retention intervals of an H-Graph, on CP-SAT.

- `model`: variables and constraints without budgets.
- `memory`: the budgets.
- `lines`: linear constraints that tighten the bound.
- `solve`: solves it and reads its executions.
"""
