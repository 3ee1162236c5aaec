"""Chooses the state of every group exactly: ({device, host} × {reshard, keep}), a MILP.

- `model`: data and variables.
- `memory_rows`: memory in whole numbers, and what a solver can count of it.
- `equations`: rows and objective.
- `start`: choices to begin with, as values of the variables.
- `solve`: solves it and reads the choices.
"""
