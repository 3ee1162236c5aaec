"""Hides transfers behind computing.

- `shift`: moves the rows of transfers and waits.
- `timeline`: says when rows happen, and what is late.
- `deadlines`: orders updates by the CPU.
"""
