"""Makes OffMate's plans (thesis 4).

- `choices`: the ways to run a block.
- `problem`: the problem that O-ILP solves.
- `answer`: translates its answer into transfers.
- `search`: proposes plans and asks O-ILP again.
"""
