"""Measures what freezing saves.

- `models`: the models of the SlimFit paper, with smaller batches.
- `saved`: bytes that forward saves for backward, predicted and measured, against the freezing rate.
"""
