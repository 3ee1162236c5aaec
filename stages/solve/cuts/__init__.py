"""Bounds the time of every schedule, and finds schedules by cutting planes.

- `way`: what is known of one way to compute the step: its best bound, and schedules that fit.
- `found`: a schedule that was found, and the referee's verdict on it.
- `naming`: finds what ways to compute the step share.
- `union`: joins ways to one graph, of which every mixture is a schedule.
- `charges`: what of the gradient's error the nodes of lossy ways cost.
- `mixed_way`: what is known of all mixtures together.
- `certain_guards`: under which masks nodes of a step that freezes run for certain.
- `frozen_bound`: bounds the mean time of a step that freezes.
- `transfers`: what is known of one way where plans may offload: its best bound.
- `statement`: states a bound in a plan, unless the plan contradicts it.
- `race`: shares the time among the ways.
- `proven`: what is proven of plans, and which are replaced by faster ones.
"""
