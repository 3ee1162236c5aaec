"""Measures what an iteration takes: memory and time.

- `measure`: the measured peak of one iteration.
- `resident`: the limit of what the process may occupy, where its own memory is the device.
- `tracing`: when each step, copy and update of an iteration began and ended.
"""
