"""Measures rematerialization beside what others do.

- `points.py`: measures every point: models × activation budgets × methods.
- `contestant.py`: the process of one point.
- `models.py`, `modules.py`: the models, and the networks that are written for them.
- `peers.py`: what others do to save memory.
- `plans.py`, `requested_plans.py`: plan one model for many budgets, and choose the budgets.
- `turns.py`: lets two processes take turns.
- `rows.py`, `summary.py`: write the rows as text and tables.
- `figure.py`: draws overhead against peak memory.
- `names.py`: constants that the processes of the benchmark share.
"""
