"""What a run looked like: one HTML page that needs nothing else, four plots, and the table that a run ends with.

facts.py        the headline numbers, predicted beside measured beside plain PyTorch
activations.py  what the plan does with every forward result: kept, recomputed, dropped
curves.py       memory over time and the timeline, merged and thinned to what a plot can show
frames.py       rows as Polars frames
data.py         memory and loss as CSV, for `dvc plots`
modules.py      which module of the model is meant
tradeoff.py     step time against budget as a picture
figures.py      the four plots that every report has
streams.py      predicted beside measured, stream by stream
units.py        bytes, times and ratios as text
page.py         the HTML page
block_tables.py its tables of blocks
iterations.py   its table of iterations, slow ones marked
write.py        the page and its plots on disk
console.py      the table for a terminal
"""

from stowage.stages.report.console import summary_table
from stowage.stages.report.write import write_page, write_report

__all__ = ["summary_table", "write_page", "write_report"]
