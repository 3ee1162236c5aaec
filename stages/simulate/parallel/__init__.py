"""Simulates one step of `n` ranks that share parameters: its time, and the memory of a rank and of the host.

All ranks do the same at the same time, so one of them stands for all.

- `lanes`: times computing, collectives and copies against each other.
- `outcome`: the result of a simulation.
- `fsdp2`: PyTorch's FSDP2 with a choice for each group of parameters.
- `chunks`: Elixir's own engine, with chunks and an rCache.
- `memory`: what a rank has in memory under FSDP2, allocation by allocation.
- `replicas`: DDP, and FSDP with the model as one unit.
- `deepspeed`: ZeRO-2 and ZeRO-3, offloaded or not, as DeepSpeed documents them.
"""
