"""Formulations that find schedules of one block.

- `checkmate`: Checkmate's MILP.
- `fixed`: fixed policies such as keep-all and recompute-all.
- `greedy`: greedy selective recomputation.
- `retention`: retention intervals, on CP-SAT.
- `rk_checkmate`: RK-Checkmate's MILP.
- `staged_milp`: what integer programs over the staged order share.
- `staged_order`: Checkmate's order of executions, and their cost.
- `tw_remat`: rematerialization along a tree decomposition.
"""
