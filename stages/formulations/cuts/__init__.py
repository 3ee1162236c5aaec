"""Cuts the whole step at nodes: a lower bound on the time of every schedule, and schedules that reach it.

- `step_graph`: the step as the formulation sees it.
- `domain`: which variables follow from the graph, and which the solver has to find.
- `beside`: what must be in memory while a node runs between two cuts.
- `masked`: what counts where only a part of the step trains.
- `equations`: the equations.
- `model`: the program, with its symbols.
- `solve`: the bound, and the answer that it belongs to.
- `start`: a known schedule as the solver's first answer.
- `schedule`: the order that an answer describes.
- `choice`: where to cut.
- `transfers`: the same where values may leave the device, and the CPU may update.
"""
