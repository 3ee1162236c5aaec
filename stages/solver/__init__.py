"""Access to MILP and CP-SAT solvers, with one form of settings and outcomes.

- `cp`: solves models of OR-Tools CP-SAT.
- `equations`: adds a paper's equations to a MILP.
- `highs_child`, `highs_process`: run HiGHS in a process of its own.
- `highs_rounding`: rounds a relaxation there, choice by choice.
- `lazy`: loads solver libraries when they are first used.
- `milp`: solves MILPs with HiGHS or CBC.
- `outcome`: settings and outcomes of solves.
"""
