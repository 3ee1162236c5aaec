"""Measures the rates of what is behind the device, and beside it.

- `disk`: reading and writing a disk.
- `host`: copies to and from pinned memory, and updates by the CPU.
- `collectives`: gathers among several ranks.
- `shares`: what one rank gets while all ranks copy and update at once.
- `at_once`: times of one process, or of all ranks together.
"""
