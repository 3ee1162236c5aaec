"""From options to node executions (`chain.py`, `order.py`), and from those to rows of a plan (`program.py`,
`of_trace.py`)."""
