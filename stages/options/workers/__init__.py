"""Processes that solve tasks.

- `pool`: a few worker processes with a queue of jobs.
- `worker`: the process that solves tasks, and the requests to it.
"""
