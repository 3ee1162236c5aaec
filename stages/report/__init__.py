"""Reports a run: one HTML page that needs nothing else, four plots, and the table that a run ends with.

- `facts`: the headline numbers, predicted beside measured beside plain PyTorch.
- `activations`: what the plan does with every forward result: kept, recomputed, dropped.
- `curves`: memory over time and the timeline, merged and thinned to what a plot can show.
- `frames`: rows as Polars frames.
- `data`: memory and loss as CSV, for `dvc plots`.
- `modules`: which module of the model a node or block belongs to.
- `tradeoff`: step time against budget as a picture.
- `figures`: the four plots that every report has.
- `streams`: predicted beside measured, stream by stream.
- `units`: bytes, times and ratios as text.
- `page`: the HTML page.
- `block_tables`: its tables of blocks.
- `iterations`: its table of iterations, slow ones marked.
- `tables`: what a report is made from.
- `write`: the page and its plots on disk.
- `console`: the table for a terminal.
"""

from stowage.stages.report.console import summary_table
from stowage.stages.report.tables import ReportTables
from stowage.stages.report.write import write_page, write_report

__all__ = ["ReportTables", "summary_table", "write_page", "write_report"]
