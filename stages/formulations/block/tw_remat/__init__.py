"""TW-Remat: rematerialization along a tree decomposition.

- `any_order`: costs of any order of executions, and orders with fewer executions in the same memory.
- `order`: the recursion that orders nodes for one limit of memory.
- `relief`: lowers the peak of an order.
- `solve`: makes schedules for many limits of memory.
- `trees`: tree decompositions and their separators.
"""
