"""Checks what must hold on a card before anything is measured in earnest, in about ten minutes.

- `first.py`: all checks in order.
- `card.py`: versions, the card, its attention kernels, free memory and direct writes.
- `times.py`: the share of a step in which the card waits for the host.
- `tests.py`: runs `tests/gpu`.
- `exact.py`: compares plans by rules with plain PyTorch, bit for bit.
- `chain.py`: measures, plans and trains a model of a few layers.
- `page.py`: writes the results as one page.
"""
