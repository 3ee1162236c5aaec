"""Greedy selective recomputation of a block.

- `lazy`: makes a schedule from a choice of what is not kept.
- `relief`: lowers the peak of a choice until budgets hold.
- `selective`: tries families of choices and takes the best.
"""
