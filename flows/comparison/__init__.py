"""Compares two plans of a project, for people's CI.

- `replan.py`: plans again, where that is honest.
- `two_plans.py`: reads two plans, from a folder or a Git revision.
- `changes.py`: writes what changed between two plans.
"""
