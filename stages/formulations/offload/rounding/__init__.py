"""The rounding of O-ILP's fractions to whole tensors (thesis 4.6).

- `algorithm_8`: rounds the fractions of one group.
- `rounding`: rounds a whole solution.
- `smoothing`: improves a rounded plan by local search.
- `subset_sum`: selects sizes that reach a sum.
- `tensors`: whole tensors in the cycle of steps, and the loads of steps.
"""
