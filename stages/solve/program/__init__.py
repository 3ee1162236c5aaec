"""Turns options into node executions, and those into rows of a plan.

- `chain`: the chain that RK-Rotor solves, and executions of its steps.
- `order`: an order of executions with its costs.
- `program`: rows of a plan from executions.
- `evicting`: orders of executions by greedy eviction.
- `relief`: repairs orders that exceed the budget a little.
- `of_trace`: the program of a trace.
- `range_minima`: minima over stretches of an array.
"""
