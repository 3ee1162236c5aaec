"""Writes the head of a step: its docstring, imports, and its signature."""

from __future__ import annotations

from stowage.stages.ir.errors import MIB
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.source import remark
from stowage.stages.ir.trace import TraceMeta

_HEADER = '''"""One {what} of {model} on {device}.

Plan {plan}: {method}, device budget {budget:,.1f} MiB, predicted peak {peak:,.1f} MiB, predicted time {time:.3f} s.
Each line is one operation; the comment gives its block, the bytes it makes and its predicted time. `again` marks a
recomputation. `del` frees; `offload`, `reload` and `wait` move tensors to the lower tier and back. Written
by codegen; change the plan, not this file.
{lossy}{freezes}"""

import torch
from torch import Tensor

from stowage.stages.runtime import Iteration

aten = torch.ops.aten


@torch.no_grad()
def step(run: Iteration) -> {returns}:
'''

_FREEZES = """
At most {active} of {units} units train in a step; peak and time are those of the worst and of the mean choice. Lines
under `if run.active(…)` run if one of these units trains, `...` standing for all between two; None frees too.
"""


def header(meta: TraceMeta, summary: PlanSummary) -> str:
    """Return the text above the lines of a training iteration, or of a forward alone."""
    what, returns = ("forward", "list[Tensor]") if meta.outputs else ("training iteration", "Tensor")
    return _HEADER.format(
        what=what,
        returns=returns,
        model=remark(meta.model),
        device=remark(summary.device),
        plan=remark(summary.plan_hash),
        method=remark(summary.method),
        budget=summary.device_budget_bytes / MIB,
        peak=summary.device_peak_bytes / MIB,
        time=summary.step_time_s,
        lossy=_lossy(summary),
        freezes=_FREEZES.format(active=summary.active_units, units=summary.units) if summary.units else "",
    )


def _lossy(summary: PlanSummary) -> str:
    """Return what is kept in fewer bits, a line for each class of tensors; nothing where all numbers are exact."""
    if not summary.lossy:
        return ""
    kept = "".join(f"- {remark(f'{e} ({effect})' if effect else e)}\n" for e, effect in summary.kept_in_codes)
    changed = "" if summary.exact else f", which changes the gradient by {summary.gradient_error:.3%} at most"
    return f"\nKept for backward in fewer bits{changed}; the codes of x are named x_int8_codes and so on:\n\n{kept}"
