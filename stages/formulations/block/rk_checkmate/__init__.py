"""RK-Checkmate, the MILP for one block (thesis 2.4).

- `model`: data, variables and equations of the MILP.
- `solve`: solves it and reads its schedule.
"""
