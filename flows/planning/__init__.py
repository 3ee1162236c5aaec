"""Runs the six planning stages in one process.

- `step.py`: plans one step: trace, profile, partition, options, solve, codegen.
- `costed.py`: the first three of these, before any budget.
- `job.py`: what is planned, and how: the arguments that travel through all of it.
- `freezing.py`: what steps of a model may freeze.
- `effort.py`: how much time planning may take, and where its stores are.
- `configured.py`: reads an effort from params.yaml.
- `planned.py`: a plan with its program and tables, and its folder.
- `plan_store.py`: keeps solved plans by everything that they depend on.
- `progress.py`: shows what planning is doing.
- `sizes.py`: plans a step in other sizes, from one that was measured.
- `batch_sizes.py`: plans several batch sizes, and chooses the best.
- `sharding.py`: plans which groups of parameters are in the host, and which stay gathered.
- `curve.py`, `curve_card.py`, `curve_result.py`: plan one step within many budgets, for this device or a card.
- `by_rules.py`: plans without a solver.
- `true_kernels.py`: traces again where real kernels differ from fake ones.
"""
