"""Makes the program of a trace: what its iteration keeps, uses up, and leaves on the device."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import ADD, CLIP, left_behind, pinned, taken_gradients
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.program import StepProgram


def program_of(trace: TraceTables, nodes: Sequence[ComputeNode]) -> StepProgram:
    """Return the program that plans of a trace are made for."""
    taken = taken_gradients(trace.calls)
    storage_of = [v.storage for v in trace.values]
    waiting = frozenset(s.storage for s in trace.storages if s.role == "gradient")
    return StepProgram(
        trace.storages,
        nodes,
        keep=frozenset(storage_of[v] for v in left_behind(trace)),
        consumed=waiting.intersection(storage_of[v] for v in taken),
        gradients=_gradients_that_stay(trace),
        pinned=pinned(trace),
    )


def _gradients_that_stay(trace: TraceTables) -> dict[int, str]:
    """Return the gradients that this micro-batch leaves in `.grad` as they were made: storage -> parameter."""
    behind = left_behind(trace)
    if any(v in behind for c in trace.calls if c.target == CLIP for v in c.returns):
        return {}  # they are scaled at the end
    stays = [g for g in trace.gradients if g.gradient_value in behind]
    return {trace.values[g.gradient_value].storage: g.parameter for g in stays}


def eager_peak_bytes(trace: TraceTables, nodes: Sequence[ComputeNode]) -> int:
    """Predict the peak of plain PyTorch: nothing recomputed, and all gradients kept until updates follow backward.

    Additions to waiting gradients take place during backward, as eager's do.
    """
    program = program_of(trace, nodes)
    program = StepProgram(program.storages, nodes, program.keep)
    late = [n.phase == "update" and trace.calls[n.calls[0]].target != ADD for n in nodes]
    order = [n for n in nodes if not late[n.node]] + [n for n in nodes if late[n.node]]
    return program.peak_bytes([Execution(n.node, "eager") for n in order])
