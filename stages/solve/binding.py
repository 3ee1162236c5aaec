"""Explains why a budget cannot be met: names the module where the leanest plan reaches its peak."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.simulate.plan import Outcome


def infeasible(budget_bytes: int, least: Outcome, trace: TraceTables, nodes: Sequence[ComputeNode]) -> Infeasible:
    """Return the error for a budget smaller than `least`, the leanest plan that was found, needs."""
    return Infeasible(
        budget_bytes=budget_bytes,
        smallest_feasible_bytes=least.peak_bytes,
        binding_step=binding_step(least, trace, nodes),
        occupants=least.occupants,
    )


def binding_step(outcome: Outcome, trace: TraceTables, nodes: Sequence[ComputeNode]) -> str:
    """Return the module and pass of the peak: `blocks.5.mlp, backward`."""
    at = {node.node: node for node in nodes}
    # A copy belongs to the node that runs next.
    later = (at[row.node] for row in outcome.untimed[outcome.peak_row :] if row.node in at)
    node = next(later, None)
    if node is None:
        return "the end of the step"
    modules = [trace.calls[call].module for call in node.calls if trace.calls[call].module]
    if node.phase == "update":
        return f"the update of {modules[-1]}" if modules else "an update"
    return f"{modules[-1] if modules else 'the outermost module or the loss'}, {node.phase}"
