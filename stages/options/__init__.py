"""The stage that makes the options of every distinct block: schedules for several budgets, judged by the referee.

- `clusters`: options of large blocks, cluster by cluster.
- `exact`: solves a block for one pair of budgets.
- `generate`: makes the options of all blocks.
- `intervals`: finds answers by retention intervals.
- `parameters`: reads the settings of a search.
- `sources`: the table of formulations that take part.
- `store`: keeps options for other runs.
- `tasks`: the pieces of work of one block.
- `workers`: the processes that do them.
"""
