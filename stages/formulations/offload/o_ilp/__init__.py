"""O-ILP, the MILP over fractions of tensors (thesis 4).

- `model`: the data, and all variables.
- `quantities`: variables of one portion of a group, step by step.
- `equations`: rows and objective.
- `solve`: solves it, in steps.
- `answers`: reads fractions, options and the bound.
"""
