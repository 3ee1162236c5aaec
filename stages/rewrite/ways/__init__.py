"""Several ways to compute a block side by side in one step.

- `identity`: finds the calls and storages of one rewrite of a trace in another.
- `splice`: puts nodes and blocks of several rewrites together.
- `mixed`: makes the mixed trace, and names it.
"""
