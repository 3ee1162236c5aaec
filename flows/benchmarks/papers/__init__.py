"""Plans the tables of the papers on their machines.

- `machines.py`: machines and models of the OffMate preprint, with its measurements.
- `exact.py`: solves the exact program of what is offloaded there.
- `tables.py`: plans these, and writes the overheads as a table.
"""
