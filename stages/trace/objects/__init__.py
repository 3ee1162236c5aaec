"""Restores the user's objects after a trace, and reads what a step uses and leaves in them.

- `preserve.py`: a snapshot of the objects: finds and undoes every change.
- `caches.py`: cached functions that a trace has filled.
- `left.py`: finds what forward and loss leave in them.
- `effects.py`: what they leave, as effects that a planned step repeats.
- `outside.py`: tensors that belong neither to the model nor to the batch.
"""
