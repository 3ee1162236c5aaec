"""Makes the table that a run ends with, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import MemorySample, StepRecord
from stowage.stages.report.facts import gather, headline, same_loss, verdict
from stowage.stages.report.units import NOTHING, number

_ENDS = 8


def summary_table(summary: PlanSummary, steps: Sequence[StepRecord], memory: Iterable[MemorySample] = ()) -> Table:
    """Make a table of budget, peaks, step times, and losses beside plain PyTorch's (the first and last of many).

    Args:
        summary: the plan's summary.
        steps: records of the iterations, in order; may be empty before training.
        memory: allocator samples; plain PyTorch's peak comes from its series `eager`.
    """
    facts = gather(steps, memory)
    title = Text(f"{summary.method} on {summary.device}")  # no markup, because a device may have any name
    caption = Text(verdict(facts), style="" if facts.equal == facts.compared else "bold red")
    table = Table(title=title, caption=caption, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("this plan", "plain PyTorch", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note", style="dim")
    for line in headline(summary, facts):
        table.add_row(line.label, line.plan, line.eager, line.ratio, line.note)
    table.add_section()
    shown = list(steps) if len(steps) <= 2 * _ENDS else [*steps[:_ENDS], None, *steps[-_ENDS:]]
    for step in shown:
        if step is None:
            table.add_row(f"… {len(steps) - 2 * _ENDS} more steps", "", "", "", "")
            continue
        compared = step.eager_loss == step.eager_loss
        mark = Text("equal", style="green") if same_loss(step) else Text("differs", style="bold red")
        table.add_row(
            f"Loss, step {step.iteration}",
            number(step.loss),
            number(step.eager_loss),
            mark if compared else NOTHING,
            "",
        )
    return table
