"""Chooses how a model is sharded over several ranks, for `shard`.

- `profile.py`: the groups of parameters and what they take, without the model in memory.
- `precision.py`: what a policy of mixed precision changes in a profile.
- `repeat.py`: rows of all blocks, from rows of a few.
- `machine.py`: the machine as the ranks measure it.
- `choose.py`: the state of each group.
- `given.py`: the states that a user's own function chooses.
- `plan.py`: the plan that `shard` returns.
"""
