"""Runs the user's own forward in plain PyTorch, to compare a plan with it.

- `shadow`: runs the forward and leaves nothing behind.
- `guard`: watches its operators, so that the budget is kept and every write can be undone.
- `operators`: which memory operators write and take.
- `weights`: reloads offloaded parameters for as long as a module needs them.
"""
