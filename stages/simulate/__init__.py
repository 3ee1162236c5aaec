"""Judges schedules and plans by plain replay (the referee), and finds out what they cost.

- `block`: the referee for one block's schedule.
- `h_graph`: the referee for schedules of an H-Graph.
- `plan`: the referee for a whole plan.
- `replay`: its rules for legality and memory.
- `timing`: its times of rows.
- `copies`: copies and updates by the CPU beside computing.
- `lower_tier`: what they have to know of the lower tier.
- `stored`: the referee for plans that come from a file.
- `slots`: places in the lower tier of what a plan offloads.
- `last_run`: costs of options, and of a block's last run.
- `together`: updates of several parameters in one call.
- `parallel`: a step of several ranks, group of parameters by group.
"""
