"""Writes losses and times of the iterations as HTML; those that took much longer than others are marked."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.run import StepRecord
from stowage.stages.report.facts import same_loss, slow
from stowage.stages.report.units import number, seconds

_STEPS_SHOWN = 12


def slow_iterations(steps: Sequence[StepRecord]) -> str:
    """Name the iterations that took much longer than others."""
    found = slow(steps)
    if not found:
        return ""
    worst = sorted(found, key=lambda s: -s.time_s)[:_STEPS_SHOWN]
    listed = ", ".join(f"{s.iteration} ({seconds(s.time_s)})" for s in sorted(worst, key=lambda s: s.iteration))
    more = f", and {len(found) - len(worst)} more" if len(found) > len(worst) else ""
    return f'<p><span class="bad">Slow iterations</span>, which the median leaves out of account: {listed}{more}.</p>'


def loss_table(steps: Sequence[StepRecord]) -> str:
    """Return the table of iterations, with loss and time of each."""
    if not steps:
        return '<p class="quiet">No iteration has run yet.</p>'
    late = {s.iteration for s in slow(steps)}
    if len(steps) <= 2 * _STEPS_SHOWN:
        body = "".join(_loss_row(s, s.iteration in late) for s in steps)
    else:
        skipped = f'<tr><td colspan="7" class="quiet">… {len(steps) - 2 * _STEPS_SHOWN} more iterations …</td></tr>'
        parts = steps[:_STEPS_SHOWN], steps[-_STEPS_SHOWN:]
        body = skipped.join("".join(_loss_row(s, s.iteration in late) for s in part) for part in parts)
    names = ("loss", "plain PyTorch", "", "learning rate", "time", "plain PyTorch")
    head = '<th class="n">iteration</th>' + "".join(f'<th class="n">{n}</th>' for n in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _loss_row(step: StepRecord, late: bool) -> str:
    mark = ""
    if step.eager_loss == step.eager_loss:
        mark = '<span class="good">equal</span>' if same_loss(step) else '<span class="bad">differs</span>'
    cells = (
        str(step.iteration), number(step.loss), number(step.eager_loss), mark,
        f"{step.learning_rate:.3g}",
        f'<span class="bad">{seconds(step.time_s)} slow</span>' if late else seconds(step.time_s),
        seconds(step.eager_time_s),
    )  # fmt: skip
    return "<tr>" + "".join(f'<td class="n">{cell}</td>' for cell in cells) + "</tr>"
