"""Measures the job of `params.yaml` beside plain PyTorch.

- `contestant.py`: the process of one contestant.
- `first_minute.py`: how long planning takes before the first step.
- `host_time.py`: how long the host takes to launch a step.
"""
