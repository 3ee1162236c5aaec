"""Solves RK-Checkmate and reads its schedule (thesis 2.4.4, Algorithm 4)."""

from __future__ import annotations

from typing import Any

from stowage.stages.formulations.block.rk_checkmate.model import RkCheckmate, build
from stowage.stages.formulations.block.staged_milp import solve_staged
from stowage.stages.formulations.block.staged_order import Executions, timeline
from stowage.stages.ir.block import Action, BlockGraph, BlockSchedule, SolveReport
from stowage.stages.solver.milp import MilpSolver
from stowage.stages.solver.outcome import SolverSettings


def rk_checkmate(
    block: BlockGraph,
    peak_bytes: int,
    save_bytes: int,
    settings: SolverSettings,
    *,
    solver: MilpSolver = "highs",
    hint: Executions | None = None,
) -> tuple[BlockSchedule | None, SolveReport | None]:
    """Find the fastest schedule of `block` within both budgets, over the staged order.

    Args:
        block: graph to schedule.
        peak_bytes: M_peak, bytes in memory at any moment of forward or backward (see `ir.block` for what counts).
        save_bytes: M_save, bytes between forward and backward, output included, incoming gradient not.
        settings: limits of the solver.
        solver: "highs" or "cbc".
        hint: executions of a schedule within both budgets, as a warm start.

    Returns:
        Schedule and report; `(None, None)` where there is provably no schedule; `(None, report)` with status
        "feasible" and an infinite objective where the limit came first.
    """
    model = build(block, peak_bytes, save_bytes)
    return solve_staged(model, settings, solver, hint, start=_warm_start, read=_read)


def _read(model: RkCheckmate) -> tuple[BlockSchedule, float]:
    """Return the schedule of the executions that the solver chose, and their time."""
    chosen = [k for t in range(model.T) for k in range(t + 1) if _on(model.executed(t, k))]
    return read_schedule(model), sum(model.graph.nodes[k].time_s for k in chosen)


def read_schedule(model: RkCheckmate) -> BlockSchedule:
    """Compute what R (or R') says and free what `delete` says, stage by stage, step by step (Algorithm 4).

    A node may run while some of its outputs are still in memory, to make the others again; those are freed first, which
    takes no more memory. The phantoms of a fast-forward are freed at once.
    """
    parts: tuple[list[Action], list[Action]] = ([], [])
    part, live = 0, set[int]()
    for t in range(model.T):
        for k in range(t + 1):
            if not _on(model.executed(t, k)):
                continue
            node = model.graph.nodes[k]
            again = sorted(live.intersection(node.creates))
            parts[part].extend(Action("free", i) for i in again)
            if k == model.loss:
                part = 1
            else:
                parts[part].append(model.graph.action(k))
            live.update(node.creates)
            released = {i for i in (*node.creates, *node.reads) if _on(model.delete[t, i, k])}
            if (t, k) in model.Rf and _on(model.Rf[t, k]):
                released.update(model.graph.phantoms(k))
            parts[part].extend(Action("free", i) for i in sorted(released))
            live -= released
    return BlockSchedule(tuple(parts[0]), tuple(parts[1]))


def _on(expression: Any) -> bool:
    value = expression.value()
    return value is not None and value > 0.5


def _warm_start(model: RkCheckmate, executions: Executions) -> None:
    """Give every variable its value in a schedule of these executions that frees each allocation after its last use."""
    line = timeline(model.graph, executions)
    for variable in model.problem.variables():
        variable.setInitialValue(0)
    live: set[int] = set()
    used, position = 0, 0
    for t in range(model.T):
        for i in live:
            model.P[t, i].setInitialValue(1)
            if (t, i) in model.S:
                model.S[t, i].setInitialValue(1)
        for k in range(t + 1):
            if position < len(line.events) and line.events[position] == (t, k):
                model.R[t, k].setInitialValue(1)
                for i in model.graph.nodes[k].creates:
                    if i not in live:
                        model.create[t, i].setInitialValue(1)
                        used += model.size(i)
                        live.add(i)
                for i in line.freed[position]:
                    model.delete[t, i, k].setInitialValue(1)
                    used -= model.size(i)
                    live.discard(i)
                position += 1
            model.U[t, k].setInitialValue(used)
    for i in live:
        model.P[model.T, i].setInitialValue(1)
        if (model.T, i) in model.S:
            model.S[model.T, i].setInitialValue(1)
