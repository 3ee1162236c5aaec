"""O-ILP, the MILP over fractions of tensors (thesis 4).

- `model`: data and variables.
- `equations`: rows and objective.
- `solve`: solves it and reads its fractions.
"""
