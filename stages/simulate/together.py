"""Puts updates of several parameters into one call of the optimizer, so that a GPU does not wait for the host.

On a GPU a call of `optimizer.step()` costs the host tens of microseconds, and the device a few: one call for each
parameter, at its gradient, keeps the device waiting. One call for many makes the same numbers in the same kernels. It
takes memory: gradients that are complete wait for the others. So an update is put off for as long as the budget has
room for the gradients that wait, and nothing else touches what it reads or changes.

Updates that follow each other in the plan with nothing between them are one call: for the referee, whose workspaces
add up, and for codegen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import UPDATE
from stowage.stages.simulate.plan import Outcome

SLOWER = 1.001
"""Factor by which a plan may be slower than before: an update that is put off may keep an offload waiting."""

Judge = Callable[[Sequence[Step]], Outcome]


@dataclass(frozen=True)
class _Update:
    """An update that was put off: its row, the rows that free what it uses up, and the bytes of that."""

    row: PlanRow
    frees: tuple[PlanRow, ...]
    retained_bytes: int
    touches: frozenset[int]


def updates_together(
    trace: TraceTables, nodes: Sequence[ComputeNode], outcome: Outcome, budget_bytes: int, judge: Judge
) -> Outcome:
    """Return the plan with updates put off, if it is for a GPU and the referee finds it as good; else as it is.

    Args:
        trace: the traced step.
        nodes: its compute nodes.
        outcome: the plan.
        budget_bytes: the budget of the device.
        judge: the referee, on the same machine.
    """
    if trace.meta.device == "cpu":  # elsewhere the calling host is the device itself
        return outcome
    try:
        found = judge(put_off(trace, nodes, outcome.rows, budget_bytes))
    except IllegalPlanError:
        return outcome
    good = found.peak_bytes <= budget_bytes and found.time_s <= SLOWER * outcome.time_s
    return found if good else outcome


def put_off(trace: TraceTables, nodes: Sequence[ComputeNode], rows: Sequence[PlanRow], budget_bytes: int) -> list[Step]:
    """Return a plan's rows with updates as late, and as many together, as the budget has room for."""
    return _Putting(trace, nodes, budget_bytes).steps(rows)


class _Putting:
    """Goes through the rows once."""

    def __init__(self, trace: TraceTables, nodes: Sequence[ComputeNode], budget_bytes: int) -> None:
        self._nodes, self._budget_bytes = nodes, budget_bytes
        self._size = [s.nbytes for s in trace.storages]
        self._passing = {s.storage for s in trace.storages if s.role in ("temporary", "gradient")}
        self._updates = {n.node for n in nodes if [trace.calls[c].target for c in n.calls] == [UPDATE]}
        self._steps: list[Step] = []
        self._waiting: list[_Update] = []
        self._resident_bytes = 0
        """Bytes on the device after the rows so far, in their old order."""

    def steps(self, rows: Sequence[PlanRow]) -> list[Step]:
        """Return the rows in their new order."""
        self._resident_bytes = rows[0].resident_bytes if rows else 0
        for bundle in _bundles(rows):
            first = bundle[0]
            if first.action == "compute" and first.node in self._updates:
                self._put_off(bundle)
            else:
                self._pass(bundle)
            self._resident_bytes = bundle[-1].resident_bytes
        self._make()
        return self._steps

    def _put_off(self, bundle: Sequence[PlanRow]) -> None:
        node = self._nodes[bundle[0].node]
        own = tuple(r for r in bundle[1:] if r.storage in self._passing and r.storage in node.reads)
        others = [r for r in bundle[1:] if r not in own]
        if others:
            self._pass(others)
        retained_bytes_now = sum(self._size[r.storage] for r in own)
        self._waiting.append(_Update(bundle[0], own, retained_bytes_now, frozenset((*node.reads, *node.mutates))))

    def _pass(self, bundle: Sequence[PlanRow]) -> None:
        """Add rows that stay where they are, after updates that cannot wait for them."""
        touched = {r.storage for r in bundle if r.storage >= 0}
        for row in bundle:
            if row.node >= 0:
                node = self._nodes[row.node]
                touched.update(node.reads, node.mutates, node.creates)
        retained_bytes_now = sum(u.retained_bytes for u in self._waiting)
        high = max(r.peak_bytes for r in bundle) + retained_bytes_now
        if high > self._budget_bytes or any(touched & u.touches for u in self._waiting):
            self._make()
        self._steps += [Step.of(row) for row in bundle]

    def _make(self) -> None:
        """Add the updates that wait: in as few calls as there is room for their workspaces."""
        used = self._resident_bytes + sum(u.retained_bytes for u in self._waiting)
        call: list[_Update] = []
        workspace = 0
        for update in self._waiting:
            more = self._nodes[update.row.node].workspace_bytes
            if call and used + workspace + more > self._budget_bytes:
                self._call(call)
                used -= sum(u.retained_bytes for u in call)
                call, workspace = [], 0
            call.append(update)
            workspace += more
        self._call(call)
        self._waiting = []

    def _call(self, updates: Sequence[_Update]) -> None:
        self._steps += [Step.of(u.row) for u in updates]
        self._steps += [Step.of(row) for u in updates for row in u.frees]


def _bundles(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Group each row with the rows right after it that free something."""
    found: list[list[PlanRow]] = []
    for row in rows:
        if row.action == "free" and found and found[-1][0].action == "compute":
            found[-1].append(row)
        else:
            found.append([row])
    return found
