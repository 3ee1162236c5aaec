"""Measures the rates of what is behind the device, and beside it.

- `disk`: reading and writing a disk.
- `host`: copies to and from pinned memory, and updates by the CPU.
- `collectives`: gathers among several ranks.
"""
