"""Follows values besides tensors that a step reads, such as numbers that change from call to call.

- `readings.py`: finds the recorded step for a batch, and records it again where values have changed.
- `changes.py`: lists what differs between two calls.
- `forms.py`: finds how numbers in a step follow from the user's numbers.
- `programs.py`: generates programs that read numbers at each call.
"""
