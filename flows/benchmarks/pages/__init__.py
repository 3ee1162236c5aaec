"""The pages in `docs/measured`, written from data.

- `measurement`: one measurement: its rows, and when, where and by which command they were made; as a JSON file
- `table`: how a table is described: columns, how they are written, what a reader needs to know
- `sections`: all pages and their tables, with `planning_tables` and `remat_tables`
- `formats`: how numbers are written
- `write`: pages, and the tables of the README, from the data
- `publish`: after a benchmark: its rows become data, and the pages are written again; `remat_cells` for the largest one
"""
