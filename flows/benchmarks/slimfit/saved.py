"""Measures what forward saves for backward against the freezing rate, and compares it with the prediction.

Everything is kept, so that what is in memory between forward and backward is what backward will read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stowage.flows.benchmarks.slimfit.models import Frozen
from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.device import device_of
from stowage.stages.formulations.freezing.coverage import by_first_unit, solved_coverage
from stowage.stages.freezing.levels import levels_of
from stowage.stages.freezing.policies import active_count
from stowage.stages.freezing.projection import Guarded
from stowage.stages.freezing.stored import guarded_plan
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.freezable import UnitKind
from stowage.stages.ir.masked_bytes import MaskedBytes
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import ALWAYS, bit, names_in
from stowage.stages.partition import make_blocks
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.observe.measure import resident_tensors
from stowage.stages.solve import PlanRequest, Solved, keep_everything_at_once
from stowage.stages.solve.frozen import MOST_BYTES
from stowage.stages.solver.outcome import SolverSettings
from stowage.stages.trace import trace_step

RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_MARK_BYTES = 7_654_321
"""Size of an allocation that marks the end of forward among the allocator's events."""
_BACKWARD = "backward"

Mask = Callable[[MaskedBytes, int, int], int]
"""Chooses the mask of so many active units, of a number of units, from what is saved."""


@dataclass(frozen=True)
class Saved:
    """What forward saves at one freezing rate under one mask.

    Attributes:
        model: the model's label.
        units: kind and number of units.
        rate: the freezing rate.
        mask: `worst`, what saves most; `last`, the last units of the model train.
        predicted_bytes, measured_bytes: in memory between forward and backward, beside what is there between steps.
        scaled_gb: the measured bytes at the paper's batch, in GB; 0 without one.
    """

    model: str
    units: str
    rate: float
    mask: str
    predicted_bytes: int
    measured_bytes: int
    scaled_gb: float = 0.0


def worst(saved: MaskedBytes, count: int, active: int) -> int:
    """Return the mask that saves most."""
    found = by_first_unit(saved.by_guard, count, active)
    return (found if found.proven else solved_coverage(saved.by_guard, count, active, SolverSettings(20.0))).mask


def last(saved: MaskedBytes, count: int, active: int) -> int:
    """Return the mask of the last units."""
    return ALWAYS | sum(bit(u) for u in range(count - active, count))


MASKS: dict[str, Mask] = {"worst": worst, "last": last}


def saved_activations(
    model: Frozen, rates: Sequence[float] = RATES, kind: UnitKind = "saving", **smaller: Any
) -> Iterator[Saved]:
    """Yield what forward saves at each rate, predicted and measured; `smaller` changes the model's configuration."""
    made, batch = model.make(model.batch, **smaller)
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    trace = trace_step(made, batch, optimizer=optimizer)
    yield from saved_of_trace(model, trace, (made, optimizer, batch), rates, kind)


def saved_of_trace(
    model: Frozen,
    trace: TraceTables,
    live: tuple[torch.nn.Module, torch.optim.Optimizer, Any],
    rates: Sequence[float],
    kind: UnitKind = "saving",
) -> Iterator[Saved]:
    """Yield what forward saves at each rate, in a step as it was recorded or as it was rewritten.

    Args:
        model: what the step is of.
        trace: the step.
        live: the model, its optimizer and a batch.
        rates: freezing rates.
        kind: the kind of units.
    """
    ready = ReadyStep(trace, live, kind)
    for rate in rates:
        for name, choose in MASKS.items():
            mask = choose(ready.saved, len(ready.units), active_count(len(ready.units), rate))
            measured = ready.measured(mask, live[2])
            scaled = measured * model.paper_batch / model.batch / 1e9
            units = f"{len(ready.units)} of {kind}"
            yield Saved(model.label, units, rate, name, ready.saved.under(mask), measured, round(scaled, 2))


class ReadyStep:
    """A step that keeps everything, ready to run under any mask.

    Attributes:
        units: the groups of parameters that a mask may freeze.
        saved: what is in memory between forward and backward, under each mask.
    """

    def __init__(
        self,
        trace: TraceTables,
        live: tuple[torch.nn.Module, torch.optim.Optimizer, Any],
        kind: UnitKind = "saving",
    ) -> None:
        """Plan the step, and bind its program to the model.

        Args:
            trace: the step.
            live: the model, its optimizer and a batch.
            kind: the kind of units.
        """
        self._model, self._optimizer, _ = live
        plan, border, solved = kept_plan(trace, kind)
        self.units, self.saved = plan.units, saved_bytes(plan, border)
        rows = [replace(row, step=_BACKWARD if row.row >= border else "forward") for row in solved.rows]
        source = emit_step(trace, plan.nodes, rows, solved.summary, (), self.units)
        known = manifest_of(source, solved.summary.plan_hash, solved.summary.configuration_hash).source_hash
        names = [unit.name for unit in self.units]
        self._program = bind(source, known, "saved.py", trace, self._model, self._optimizer, units=names)
        self._program.recorder = _Marks()  # type: ignore[assignment]

    def measured(self, mask: int, batch: Any) -> int:
        """Run one step in which a mask trains, and return what is in memory between its forward and its backward."""
        self._program.active.choose(names_in(self.units, mask))
        return _measured(self._program, self._model, self._optimizer, batch)


def kept_plan(trace: TraceTables, kind: UnitKind = "saving") -> tuple[Guarded, int, Solved]:
    """Return the plan that keeps everything, with its guards, and its first row that is not forward."""
    costs = {c.signature: Cost(c.signature, "", 1e-6, 0, 0, 0, "roofline") for c in trace.calls}
    nodes, _ = make_blocks(trace, costs)
    solved = keep_everything_at_once(trace, nodes, PlanRequest(device_budget_bytes=MOST_BYTES))
    assert solved is not None
    plan = guarded_plan(trace, nodes, solved.rows, (), units_of(trace, kind))
    border = next(row for row in solved.rows if row.action == "compute" and nodes[row.node].phase != "forward").row
    return plan, border, solved


def saved_bytes(plan: Guarded, border: int) -> MaskedBytes:
    """Return what is in memory right before a row, without what is there between steps."""
    short = replace(plan, steps=plan.steps[:border])
    whole = levels_of(replace(plan, steps=[*short.steps, plan.steps[border]]))[-1].by_guard
    node = plan.nodes[plan.steps[border].node]
    own = sum(plan.trace.storages[s].nbytes for s in node.creates)
    found = dict(whole)
    found[plan.guards.rows[border]] = found.get(plan.guards.rows[border], 0) - own
    found[ALWAYS] = found.get(ALWAYS, 0) - sum(s.nbytes for s in plan.trace.storages if s.role != "temporary")
    return MaskedBytes(border, {g: n for g, n in found.items() if n})


class _Marks:
    """Marks the end of forward among the allocator's events."""

    def begin(self, label: str) -> None:
        """Take and release memory of a size that nothing else has, where backward begins."""
        if label == _BACKWARD:
            torch.empty(_MARK_BYTES, dtype=torch.uint8, device="cpu")

    def span(self, stream: str, name: str) -> Any:
        """Record nothing."""
        return torch.no_grad()

    def end(self) -> None:
        """Record nothing."""


def _measured(program: Program, model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> int:
    tensors = [*resident_tensors(model, optimizer, batch), *program.resident()]
    events = device_of("cpu").measure(lambda: program(batch), tensors).events
    used = 0
    for event in events:
        if event.nbytes == _MARK_BYTES:
            return used
        used += event.nbytes
    raise AssertionError("forward ended without a mark")
