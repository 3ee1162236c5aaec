"""Trains under a memory limit of the kernel.

- `cgroup.py`: runs a command under a limit, and finds the smallest one that it survives.
- `limited.py`: the process that trains under the limit.
- `quarter.py`: trains in a quarter of the memory that plain PyTorch needs.
"""
