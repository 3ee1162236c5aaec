"""Finds what forward and loss leave behind in the user's objects, so that a planned step leaves the same.

Examples are `self.logs = {"kl": kl.detach()}`, a list of metrics, or a counter. While a step is traced its code runs
once, and what it changes is undone. What changed is kept as effects: a place, and the content to put there, with
placeholders for the tensors and numbers of a step. Tracing again from other values tells what a number is: set, or
added to what is there, read off a tensor, or always the same.
"""

from __future__ import annotations

import collections
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from stowage.stages.ir.errors import TraceError
from stowage.stages.structure import tensors_of
from stowage.stages.structure.memory import is_generator
from stowage.stages.trace.objects.effects import Effect, Left, Number, Place, kind_of, put
from stowage.stages.trace.objects.preserve import Change, Snapshot
from stowage.stages.workload.outputs import OutputForm

HOOKS = frozenset(
    ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
     "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)  # fmt: skip
MOVED = 1009
"""The amount by which a number is changed before the code runs again, to see what the code does to it."""

_NUMBERS = (int, float)


@dataclass(frozen=True)
class Seen:
    """One change by one trace, taken apart.

    Attributes:
        place: where the change is.
        kind: see `Effect`.
        form, tensors, numbers: the new content; None, and nothing, where the place was deleted.
        before: the number that was there, or None.
        was: the kind of object that was there.
        replaced: the object that was there.
    """

    place: Place
    kind: Literal["set", "append", "members", "delete"]
    form: OutputForm | None
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[Number, ...]
    before: Number | None
    was: str = ""
    replaced: Any = field(default=None, compare=False)


def see(snapshot: Snapshot, model: nn.Module) -> list[Seen]:
    """List what a trace has changed, taken apart.

    Raises:
        TraceError: a change that a planned step cannot repeat.
    """
    changes = snapshot.changes()
    hooks = {
        id(module.__dict__[name]) for module in model.modules() for name in HOOKS if name in module.__dict__
    }  # a library's hooks from a module's first run are not kept: the next trace installs them again
    installs = any(id(change.holder) in hooks or change.key in HOOKS for change in changes)
    modules = {id(module) for module in model.modules()}
    found: list[Seen] = []
    for change in changes:
        if change.key is Change.MEMORY:
            raise _in_memory(change, snapshot)
        if change.key == "data" and isinstance(change.holder, torch.Tensor):
            raise _replaced(change.holder, model)
        if id(change.holder) in hooks or change.key in HOOKS or isinstance(change.holder, torch.Tensor):
            continue
        if installs and id(change.holder) in modules and isinstance(change.new, bool):
            continue
        _refuse(change, model)
        found.append(_seen(change, snapshot))
    return sorted(found, key=lambda seen: seen.place.name())


def _refuse(change: Change, model: nn.Module) -> None:
    for path, module in model.named_modules():
        if change.holder is module._parameters:
            raise _named(f"Parameter '{path}.{change.key}'" if path else f"Parameter '{change.key}'")


def _replaced(tensor: torch.Tensor, model: nn.Module) -> TraceError:
    everything = [*model.named_parameters(), *model.named_buffers()]
    name = next((f"'{name}'" for name, own in everything if own is tensor), f"of shape {tuple(tensor.shape)}")
    kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"
    return _named(f"{kind} {name}")


def _named(what: str) -> TraceError:
    return TraceError(
        f"{what} is replaced in forward, which a planned step would not repeat: change it in place "
        "(`with torch.no_grad(): parameter.copy_(...)`)."
    )


def _in_memory(change: Change, snapshot: Snapshot) -> TraceError:
    what = f"the {type(change.holder).__name__} at {snapshot.way_to(change.holder)}"
    if is_generator(change.holder):
        return TraceError(
            f"The step draws from {what}, whose state a plan does not keep: draw from PyTorch's global generator, or "
            "before the step, and pass the numbers in the batch."
        )
    return TraceError(
        f"The step changes {what}, which a planned step would not do again: keep a tensor, a number or a list there, "
        "or change it before the step."
    )


def _seen(change: Change, snapshot: Snapshot) -> Seen:
    place = Place(snapshot.way_to(change.holder), change.holder, change.key)
    if change.new is Change.MISSING:
        return Seen(place, "delete", None, (), (), None, kind_of(change.old))
    kind: Literal["set", "append", "members"] = "set"
    content: Any = change.new
    if change.key is None and not isinstance(change.holder, types.CellType):
        kind, content = _sequence(change)
    before = change.old if type(change.old) in _NUMBERS else None
    was = kind_of(change.old) if kind == "set" else ""
    try:
        form, tensors, numbers = OutputForm.with_numbers(content)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        if tensors_of(content):
            raise TraceError(
                f"The step leaves a {type(content).__name__} at {place.name()} that cannot be made again for each step "
                f"({error}): leave tensors, or lists, dictionaries or dataclasses of them."
            ) from error
        form, tensors, numbers = OutputForm.kept_whole(content), [], []
    return Seen(place, kind, form, tuple(tensors), tuple(numbers), before, was, change.old)


def _sequence(change: Change) -> tuple[Literal["append", "members"], Any]:
    old, new = change.old, change.new
    if isinstance(change.holder, set):
        return "members", new
    dropped = 0
    if isinstance(change.holder, collections.deque) and change.holder.maxlen == len(new):
        dropped = next((k for k in range(len(old)) if _same(old[k:], new[: len(old) - k])), len(old))
    kept = len(old) - dropped
    if kept and len(new) >= kept and _same(old[dropped:], new[:kept]):
        return "append", list(new[kept:])
    return ("append", list(new)) if not old else ("members", list(new))


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))


def move_numbers(seen: Sequence[Seen], round_: int) -> None:
    """Put other numbers in the places where the code changed numbers, before it runs again."""
    for change in seen:
        if change.before is not None:
            put(change.place.holder, change.place.key, change.before + type(change.before)(MOVED * round_))


def effects_of(
    rounds: Sequence[Sequence[Seen]],
    answers: Sequence[Sequence[Number]],
    position: Callable[[torch.Tensor], int],
    reading: Callable[[int], int],
) -> Left:
    """Return what several traces of one step have left, as effects.

    Args:
        rounds: the changes of each trace, in one order.
        answers: for each trace the numbers that stood for those that were read off tensors.
        position: returns the position of a tensor of the first trace among the program's outputs.
        reading: returns the position of a number that was read among the program's outputs.

    Raises:
        TraceError: a number is made in a way that cannot be followed.
    """
    first = rounds[0]
    for other in rounds[1:]:
        alike = len(other) == len(first) and all(
            (a.place.holder is b.place.holder and a.place.key == b.place.key and a.kind == b.kind)
            and (a.form is None or b.form is None or a.form.content == b.form.content)
            for a, b in zip(first, other, strict=True)
        )
        if not alike:
            raise _unfollowed(first[0] if first else other[0])
    whole = [
        [seen.numbers[0] if _is_number(seen) else None for seen in trace] for trace in rounds
    ]  # numbers at each place at the end of the step
    effects: list[Effect] = []
    for at, seen in enumerate(first):
        column = [trace[at] for trace in rounds]
        tensors = tuple(position(tensor) for tensor in seen.tensors)
        added = _added(column, answers, reading) if len(rounds) > 1 and _is_number(seen) else None
        if added is not None:
            effects.append(Effect(seen.place, "add", None, (), (added,), seen.was))
            continue
        numbers = tuple(
            _source([trace.numbers[i] for trace in column], answers, reading, whole, at)
            for i in range(len(seen.numbers))
        )
        if any(source is None for source in numbers):
            raise _unfollowed(seen)
        known = tuple(source for source in numbers if source is not None)
        effects.append(Effect(seen.place, seen.kind, seen.form, tensors, known, seen.was))
    return Left(_in_order(effects))


def _is_number(seen: Seen) -> bool:
    return seen.kind == "set" and len(seen.numbers) == 1 and not seen.tensors and seen.before is not None


def _added(
    column: Sequence[Seen], answers: Sequence[Sequence[Number]], reading: Callable[[int], int]
) -> tuple[Literal["always", "tensor"], Any] | None:
    """Return the source of the number that is added to what was there; None if nothing is added."""
    befores = [seen.before for seen in column]
    news = [seen.numbers[0] for seen in column]
    known = [b for b in befores if b is not None]
    if len(known) < len(befores) or len(set(known)) < 2:
        return None
    for which in range(min(map(len, answers))):
        if all(_equal(b + given[which], new) for b, given, new in zip(known, answers, news)):
            return "tensor", reading(which)
    by = news[0] - known[0]
    return ("always", by) if all(_equal(b + by, new) for b, new in zip(known, news)) else None


def _source(
    values: Sequence[Number],
    answers: Sequence[Sequence[Number]],
    reading: Callable[[int], int],
    whole: Sequence[Sequence[Number | None]],
    own: int,
) -> tuple[Literal["always", "tensor", "place"], Any] | None:
    """Return the source of a number that has these values in the traces; None if it is unknown."""
    if all(_equal(value, values[0]) for value in values):
        return "always", values[0]
    for which in range(min(map(len, answers))):
        if all(_equal(value, given[which]) for value, given in zip(values, answers)):
            return "tensor", reading(which)
    for at in range(len(whole[0])):
        there = [trace[at] for trace in whole]
        if at != own and all(t is not None and _equal(value, t) for value, t in zip(values, there)):
            return "place", at
    return None


def _in_order(effects: list[Effect]) -> tuple[Effect, ...]:
    """Put effects that take a number from another place after the others."""
    refers = {i for i, e in enumerate(effects) if any(kind == "place" for kind, _ in e.numbers)}
    order = [i for i in range(len(effects)) if i not in refers] + sorted(refers)
    new = {old: i for i, old in enumerate(order)}
    found = []
    for old in order:
        effect = effects[old]
        numbers = tuple((kind, new[which] if kind == "place" else which) for kind, which in effect.numbers)
        found.append(replace(effect, numbers=numbers))
    return tuple(found)


def _unfollowed(seen: Seen) -> TraceError:
    return TraceError(
        f"The step leaves something at {seen.place.name()} that is another at each call in a way that cannot be "
        "followed (from a tensor's value, the clock, a file): leave the tensor itself, or the number that .item() "
        "gives."
    )


def _equal(one: Number, other: Number) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))
