"""Says in words why a step is planned while training, and what form a batch has."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from stowage.flows.api.steps import KnownSteps
from stowage.stages.ir.amounts import size_text, time_text
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.trace import MicroBatch
from stowage.stages.workload import BatchSignature, ModelSignature

_SHAPE = re.compile(r"^\S+ (\([\d, ]*\))")
_FORM = re.compile(r"^\S+ \([\d, ]*\)")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")

_MOST = 4
"""Most shapes of a batch that are listed."""


def shapes_of(batch: BatchSignature) -> tuple[str, ...]:
    """Return the shapes of a batch's tensors, in order."""
    found = (_SHAPE.match(leaf.value) for leaf in batch.leaves if leaf.kind == "tensor")
    return tuple(match.group(1) for match in found if match)


def form_of(batch: BatchSignature) -> str:
    """Return the distinct shapes of a batch as text, without single numbers if there are others: `(8, 96)`."""
    shapes = list(dict.fromkeys(shapes_of(batch)))
    distinct = [s for s in shapes if s != "()"] or shapes
    if not distinct:
        return "of no tensors"
    return ", ".join(distinct[:_MOST]) + (", …" if len(distinct) > _MOST else "")


def tensors_text(batch: BatchSignature) -> str:
    """Return name, type and shape of each tensor of a batch, a line each; not its device, as each rank has its own."""
    found = ((leaf.path, _FORM.match(leaf.value)) for leaf in batch.leaves if leaf.kind == "tensor")
    return "\n".join(f"{path} {match.group(0)}" for path, match in found if match)


def ordinal(number: int) -> str:
    """Return a number as an ordinal: `third`, `11th`."""
    if number <= len(_ORDINALS):
        return _ORDINALS[number - 1]
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{suffix}"


def why(
    batch: BatchSignature,
    model: ModelSignature,
    micro_batch: MicroBatch | None,
    known: Sequence[tuple[BatchSignature, ModelSignature]],
    seen: Collection[BatchSignature],
) -> str:
    """Say in one phrase why a step is planned.

    Args:
        batch: the form of the batch that is planned.
        model: the signature of the model.
        micro_batch: the micro-batch that is planned; None for a forward alone.
        known: what was planned before, the latest first.
        seen: forms of batches of this run, this one not among them unless it was there before.
    """
    if batch not in seen:
        return f"{_new(batch, seen)}: {ordinal(len(seen) + 1)} of this run"
    same = [other for form, other in known if form == batch]
    if not same:
        return f"shape {form_of(batch)} again, whose program had made room for others"
    if all(other != model for other in same):
        differences = same[0].differences(model)
        return "the model has changed: " + (differences[0].removesuffix(".") if differences else "another mode")
    if micro_batch is None:
        return "weights rest elsewhere now"
    if not micro_batch.update:
        return "a micro-batch before the update"
    return "the micro-batch that updates" if micro_batch.waiting else "an update of its own"


def planned_text(plan: PlanSummary, took_s: float, reason: str, traced_s: float = 0.0) -> str:
    """Say in one line what was planned.

    Args:
        plan: the summary of the step's plan.
        took_s: seconds from the trace on.
        reason: see `why`; "" for the first plan of a run.
        traced_s: seconds of tracing alone, the least that a new shape takes; 0 to leave it out.
    """
    next_one = f"; a new shape that fits will take about {max(traced_s, 0.1):.1f} s" if traced_s else ""
    because = f", {reason}" if reason else ""
    if plan.units:
        next_one = f"; at most {plan.active_units} of {plan.units} units train in a step{next_one}"
    return (
        f"Planned in {took_s:.1f} s{because}; predicted: peak {size_text(plan.device_peak_bytes)} "
        f"of {size_text(plan.device_budget_bytes)}, {time_text(plan.step_time_s)} a step ({plan.method})"
        f"{next_one}."
    )


def _new(batch: BatchSignature, seen: Collection[BatchSignature]) -> str:
    """Say which shape is new, or what else is."""
    shapes = shapes_of(batch)
    for other in seen:
        if shapes_of(other) == shapes and len(other.leaves) == len(batch.leaves):
            differences = other.differences(batch)
            if differences:
                return "new batch, " + differences[0].removesuffix(".")
    return f"new shape {form_of(batch)}"


def step_text(model: str, optimizer: str, known: Sequence[KnownSteps]) -> str:
    """Describe a training step in a few lines.

    Args:
        model: name of the model's class.
        optimizer: name of the optimizer's class.
        known: its programs, the latest first.
    """
    if not known:
        return f"<TrainingStep of {model}, nothing planned yet>"
    plan = known[0].planned.summary
    forms = "; ".join(dict.fromkeys(form_of(k.key[0]) for k in known))
    return (
        f"<TrainingStep of {model}: {plan.method}, {time_text(plan.step_time_s)} a step predicted\n"
        f" peak {size_text(plan.device_peak_bytes)} of {size_text(plan.device_budget_bytes)}, optimizer "
        f"{optimizer if optimizer != 'NoneType' else 'none'}\n"
        f" {len(known)} program{'s' * (len(known) != 1)} in memory, for batches of {forms}>"
    )
