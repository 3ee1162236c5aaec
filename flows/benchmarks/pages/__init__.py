"""Writes the pages in `docs/measured` from data.

- `measurement.py`: one measurement as a JSON file: its rows, and when, where and by which command they were made.
- `table.py`: describes a table: its columns, how they are written, what a reader needs to know.
- `sections.py`: all pages and their tables.
- `planning_tables.py`, `remat_tables.py`, `ranks_tables.py`: tables of planning time, rematerialization, ranks.
- `formats.py`: writes numbers for people.
- `write.py`: writes the pages, and the tables of the README, from the data.
- `publish.py`: turns the rows of a benchmark into data, and writes the pages again.
- `remat_cells.py`: makes the cells of the rematerialization tables.
"""
