"""Options of large blocks, cluster by cluster.

- `explore`: solves one cluster for several budgets.
- `graphs`: makes H-Graphs of regions and reads their schedules.
- `lift`: makes an option of a cluster from the executions of its nodes.
- `order`: orders the backward nodes of a region.
- `owners`: finds the forward node that each backward node belongs to.
- `regions`: describes a block as a tree of regions.
- `tasks`: the pieces of work of one cluster.
- `work`: solves a large block from its smallest clusters to the whole.
"""
