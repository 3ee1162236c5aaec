"""Bounds the time of every schedule, and finds schedules by cutting planes.

- `way`: what is known of one way to compute the step: its best bound, and schedules that fit.
- `transfers`: what is known of one way where plans may offload: its best bound.
- `race`: shares the time among the ways.
- `proven`: what is proven of plans, and which are replaced by faster ones.
"""
