"""Schedules of an H-Graph: a large block as a graph of clusters (thesis 3).

- `answer`: the answer of a formulation for one pair of budgets.
- `as_chain`: an H-Graph as the chain of blocks that RK-Rotor plans.
- `budgets`: chooses the budgets that an H-Graph is solved for.
- `greedy`: grows a choice until budgets hold.
- `h_ilp`: H-ILP, a MILP.
- `lazy`: executions that follow from a choice.
- `offered_options`: chooses schedules of a cluster to offer to the H-Graph above.
- `policies`: fixed policies, and first schedules for the solvers.
- `problem`: facts that follow from an H-Graph.
- `retention`: retention intervals, on CP-SAT.
- `rotor`: RK-Rotor on an H-Graph.
- `staged_order`: executions over the staged order, and their cost.
"""
