"""Replays random numbers, and saves and restores the state of the process around a forward.

- `randomness`: an operation that runs again draws what it drew the first time.
- `generators`: the states of the global random generators.
- `python_state`: what a forward may change in Python objects, so that it can be undone.
"""
