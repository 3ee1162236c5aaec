"""Traces a step several times, to learn what it does whatever its numbers are, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stowage.stages.ir.errors import DrawsElsewhere, TraceError
from stowage.stages.ir.trace import Call, Constant, Gradient, Storage, Value
from stowage.stages.trace.capture import Captured
from stowage.stages.trace.compact import compact
from stowage.stages.trace.explain import cause_of
from stowage.stages.trace.lower import Lowering
from stowage.stages.trace.objects.effects import Left
from stowage.stages.trace.objects.left import MOVED, Seen, effects_of
from stowage.stages.trace.recording.readings import ROUNDS, Readings

DRAWS = 3
"""The number of traces in which Python's generators must change before the step itself is blamed.

Other threads, such as those that keep connections alive, draw from them too.
"""

MOST_CHECKS = 32
"""The most truth values that the user's code may insist on."""

Trace = Callable[[Readings, Sequence[Seen]], Captured]
"""Traces once, with these answers, and with changed numbers where an earlier trace changed them."""


@dataclass(frozen=True)
class Lowered:
    """The tables of a program, without what happens to gradients.

    Attributes:
        outputs: values that it returns.
        left: values that it leaves behind.
        counted: positions in `left` of those that replace a source of the trace.
    """

    storages: list[Storage]
    values: list[Value]
    calls: list[Call]
    gradients: list[Gradient]
    constants: list[Constant]
    outputs: tuple[int, ...]
    left: tuple[int, ...] = ()
    counted: frozenset[int] = frozenset()


def trace_rounds(trace: Trace, decisions: tuple[bool, ...] = ()) -> tuple[Captured, Lowered, Left]:
    """Return the trace, its tables, and what is left behind.

    Args:
        trace: traces the step once.
        decisions: truth values that are read off tensors, where they are not all true.

    Raises:
        TraceError: the step depends on numbers that are read off tensors, or leaves what cannot be followed.
    """
    trace = _undisturbed(trace)
    first, readings = _first(trace, Readings(decisions=decisions))
    decisions = readings.decisions
    lowering = Lowering(first)
    lowering.run()
    rounds: list[Sequence[Seen]] = [first.seen]
    answers = [_answers(readings)]
    insists: dict[int, str] = {}
    if readings.refusal is not None or any(change.numbers for change in first.seen):
        bare = _content(_lowered(lowering, first.returns, 0))
        for round_ in range(1, ROUNDS):
            again = Readings(round_, decisions)
            try:
                other, again = _allowed(trace, again, first.seen, insists)
                same = _content(_lowered_alone(other)) == bare
            except Exception as error:
                if readings.refusal is None:
                    raise
                raise readings.refusal from cause_of(error)
            if not same:
                raise readings.refusal or _steers(first.seen)
            if round_ < ROUNDS - 1 or not readings.truths:
                rounds.append([_moved(change, first.seen, round_) for change in other.seen])
                answers.append(_answers(again))
    count = sum(len(change.tensors) for change in first.seen)
    positions = {id(t): i for i, t in reversed(list(enumerate(t for c in first.seen for t in c.tensors)))}
    left = effects_of(rounds, answers, lambda t: positions[id(t)], lambda which: count + which)
    truths = count + len(readings.numbers)
    decided = [(truths + i, truth) for i, (_, truth) in enumerate(readings.truths)]
    checks = tuple((*decided[i], text) for i, text in sorted(insists.items()))
    left = replace(left, decisions=tuple(decided) if left.effects else (), checks=checks)
    return first, *_needed(lowering, first, left)


def _undisturbed(trace: Trace) -> Trace:
    """Repeat a trace that draws random numbers, and let the error through only if it does so each time."""

    def again(readings: Readings, changed: Sequence[Seen]) -> Captured:
        for _ in range(DRAWS - 1):
            try:
                return trace(readings, changed)
            except DrawsElsewhere:
                readings.forget()
        return trace(readings, changed)

    return again


def _first(trace: Trace, readings: Readings) -> tuple[Captured, Readings]:
    """Return a trace in which no check of the user's code (`if not torch.isfinite(x).all(): raise`) fails."""
    original: TraceError | None = None
    for _ in range(MOST_CHECKS):
        try:
            return trace(readings, ()), readings
        except TraceError as error:
            if _raised(error) == "":  # behind the checks that have raised, which would not raise in a step
                raise
            original = original or error
            truths = tuple(truth for _, truth in readings.truths)
            if not truths or not truths[-1]:
                raise original from original.__cause__
            readings = Readings(decisions=(*truths[:-1], False))
    raise original or AssertionError


def _raised(error: TraceError) -> str:
    """Return what the user's code raised and where; "" where the step cannot be traced for another reason."""
    place, _, raised = str(error).partition(" cannot be traced: ")
    return f"{raised.partition(':')[0]} in {place[:1].lower()}{place[1:]}" if raised else ""


def _allowed(
    trace: Trace, readings: Readings, seen: Sequence[Seen], insists: dict[int, str]
) -> tuple[Captured, Readings]:
    """Return a trace with other answers.

    If the code raises because of the last truth value, that one gets its first answer again, and `insists` notes it.
    """
    while True:
        try:
            return trace(readings, seen), readings
        except TraceError as error:
            free = [i for i in range(len(readings.truths)) if i not in readings.insisted]
            raised = _raised(error)
            if readings.round < ROUNDS - 1 or not free or len(insists) >= MOST_CHECKS or not raised:
                raise
            insists[free[-1]] = raised
            readings = Readings(readings.round, readings.decisions, frozenset(insists))


def _answers(readings: Readings) -> list[Any]:
    return [answer for _, answer in readings.numbers]


def _lowered_alone(captured: Captured) -> Lowered:
    lowering = Lowering(captured)
    lowering.run()
    return _lowered(lowering, captured.returns, 0)


def _lowered(lowering: Lowering, returns: int, left: int) -> Lowered:
    storages, values, calls, gradients, constants, outputs = compact(lowering, lowering.outputs[: returns + left])
    return Lowered(storages, values, calls, gradients, constants, outputs[:returns], outputs[returns:])


def _content(lowered: Lowered) -> tuple[Any, ...]:
    """Return the tables without names, which depend on calls that nothing needs."""
    return (
        [(s.nbytes, s.role) for s in lowered.storages],
        [replace(v, name="") for v in lowered.values],
        lowered.calls,
        lowered.gradients,
        lowered.constants,
        lowered.outputs,
    )


def _needed(lowering: Lowering, captured: Captured, left: Left) -> tuple[Lowered, Left]:
    """Return the tables with only those left values as outputs that effects take."""
    if not left.effects and not left.checks:
        return _lowered(lowering, captured.returns, 0), Left()
    used = sorted(
        {i for e in left.effects for i in e.tensors}
        | {which for e in left.effects for kind, which in e.numbers if kind == "tensor"}
        | {position for position, _ in left.decisions}
        | {position for position, _, _ in left.checks}
    )
    new = {old: i for i, old in enumerate(used)}
    lowering.outputs[captured.returns :] = [lowering.outputs[captured.returns + i] for i in used]
    lowered = _lowered(lowering, captured.returns, len(used))
    counted = frozenset(new[i] for i in captured.counted if i in new)
    return replace(lowered, counted=counted), left.renumbered(new)


def _moved(change: Seen, before: Sequence[Seen], round_: int) -> Seen:
    """Return the change with the number that was there when the code ran."""
    for earlier in before:
        same = earlier.place.holder is change.place.holder and earlier.place.key == change.place.key
        if same and earlier.before is not None and change.before is not None:
            return replace(change, before=change.before + type(change.before)(MOVED * round_))
    return change


def _steers(seen: Sequence[Seen]) -> TraceError:
    name = next((c.place.name() for c in seen if c.numbers), "something")
    return TraceError(
        f"Forward or loss changes {name} and the step depends on it, which a planned step would not repeat: make it a "
        "tensor, such as a buffer, and change it in place, or change it outside of the step."
    )
