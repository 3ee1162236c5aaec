"""Makes schedules of a whole step by greedy eviction, in the way of DTR (Kirisame et al. 2021) with the future known.

- `step`: the step as the rules see it.
- `rule`: which value is dropped first.
- `values`: what is in memory, when it is needed next, and what it would take to make it again.
- `evict`: runs the step within a budget.
"""
