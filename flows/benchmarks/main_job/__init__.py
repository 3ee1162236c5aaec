"""Measures the job of `params.yaml` beside plain PyTorch.

- `job.py`: plans at several budgets, beside plain PyTorch and gradient checkpointing.
- `contestant.py`: the process of one contestant.
- `first_minute.py`: how long planning takes before the first step.
- `host_time.py`: how long the host takes to launch a step.
"""
