"""Decides where the shards of each group of parameters live, and which gathered weights are kept (Elixir).

- `problem`: the groups, the machine and the budgets.
- `cost_model`: how long FSDP2's lanes are busy with a group in each of its four states.
- `memory`: what is on a device at every moment, by the states of all groups.
- `elixir`: the search of the Elixir paper.
- `four_states`: the exact choice for every group, a MILP.
- `fixed`: the policies that treat all groups alike.
- `race`: the best of them all, by the referee's judgement.
"""
