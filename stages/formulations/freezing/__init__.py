"""Finds which units need most memory when they train together.

- `worst_mask`: over all rows of a plan.
- `coverage`: at one row.
"""
