"""H-ILP, the MILP for one H-Graph (thesis 3.4).

- `model`: data and variables.
- `equations`: constraints and objective.
- `solve`: solves it for budgets and reads its schedules.
"""
