"""Holds what a step leaves behind in the user's objects, and does it to them after a planned step."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from stowage.stages.ir.errors import StaleStep
from stowage.stages.structure.containers import add, builtin_of, item_of
from stowage.stages.structure.kinds import attributes_of, is_of, slots_of
from stowage.stages.trace.lines import source_line
from stowage.stages.trace.objects.preserve import Change, PreserveWay, set_attribute
from stowage.stages.workload.outputs import OutputForm

Number = int | float


@dataclass(frozen=True)
class Place:
    """The place of a change.

    Attributes:
        way: the way to the holder, from what runs.
        holder: a module, an object, a dictionary, a list, a cell.
        key: attribute or key; None for the members of a list or set, and for the content of a cell.
    """

    way: PreserveWay
    holder: Any
    key: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.holder is other.holder and self.key == other.key)

    def __hash__(self) -> int:
        return hash((id(self.holder), self.key))

    def name(self) -> str:
        """Return the place as text, for people."""
        text = str(self.way)
        if self.key is None:
            return text
        if isinstance(self.holder, nn.Module):
            text += f" ({source_line(self.holder)})"
        return f"{text}[{self.key!r}]" if isinstance(self.holder, dict) else f"{text}: {self.key}"

    def holder_now(self) -> Any:
        """Return the object that is at the end of the way now."""
        if isinstance(self.holder, types.CellType):
            return self.holder
        try:
            found = self.way.end()
        except (LookupError, AttributeError, TypeError):
            return self.holder
        return found if type(found) is type(self.holder) else self.holder


@dataclass(frozen=True)
class Effect:
    """The change that a step makes in one place.

    Attributes:
        place: the place.
        kind: `set` puts content there, `append` appends its items, `members` replaces all items, `delete` removes the
            key, `add` adds a number.
        form: the content.
        tensors: positions of its tensors among what the program returns behind its loss.
        numbers: the source of each of its numbers: `always` the same, the value of a `tensor` (a position), or what is
            then at another `place` (a position among the effects).
        was: the kind of object that is there before the step: if it is of another kind, the code may do something else.
    """

    place: Place
    kind: Literal["set", "append", "members", "delete", "add"]
    form: OutputForm | None
    tensors: tuple[int, ...]
    numbers: tuple[tuple[Literal["always", "tensor", "place"], Any], ...]
    was: str = ""


@dataclass(frozen=True)
class Left:
    """Everything that a step leaves behind, in the order in which it is put there.

    Attributes:
        effects: what the step does to each place.
        decisions: truth values that were read off tensors, as positions among what the program returns behind its loss,
            and the value each was assumed to have: with other values the step may leave something else.
        checks: those of them that the user's code insists on, with what it raises otherwise.
    """

    effects: tuple[Effect, ...] = ()
    decisions: tuple[tuple[int, bool], ...] = ()
    checks: tuple[tuple[int, bool, str], ...] = ()

    def stands(self) -> bool:
        """Say whether all places have the same kinds of objects before this step as when it was traced."""
        return all(kind_of(_look(e.place.holder_now(), e.place.key)) == e.was for e in self.effects if e.was)

    def renumbered(self, new: Mapping[int, int]) -> Left:
        """Return the same with tensors at other positions."""
        effects = tuple(
            replace(
                effect,
                tensors=tuple(new[i] for i in effect.tensors),
                numbers=tuple((kind, new[which] if kind == "tensor" else which) for kind, which in effect.numbers),
            )
            for effect in self.effects
        )
        decisions = tuple((new[i], truth) for i, truth in self.decisions)
        return Left(effects, decisions, tuple((new[i], truth, text) for i, truth, text in self.checks))

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise `StaleStep` where a truth value is not what the user's code insists on."""
        for i, truth, text in self.checks:
            if bool(tensors[i].item()) != truth:
                raise StaleStep(
                    f"A value that the code looks at is another one in this batch than when the step was traced, and "
                    f"there it raises {text}: this step, which has been done, is not one of plain PyTorch; look at the "
                    "batch, and go on from a checkpoint."
                )

    def decided(self, tensors: Sequence[torch.Tensor]) -> tuple[bool, ...] | None:
        """Return the truth values if any is not as assumed; else None."""
        now = tuple(bool(tensors[i].item()) for i, _ in self.decisions)
        return None if now == tuple(truth for _, truth in self.decisions) else now

    def apply(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do to the user's objects what plain PyTorch's step would have done; `tensors` follow the loss."""
        for effect in self.effects:
            holder, key = effect.place.holder_now(), effect.place.key
            numbers = [self._number(source, tensors) for source in effect.numbers]
            if effect.kind == "add":
                put(holder, key, _get(holder, key) + numbers[0])
            elif effect.kind == "delete":
                _remove(holder, key)
            else:
                assert effect.form is not None
                content = effect.form.fill([tensors[i] for i in effect.tensors], numbers)
                if effect.kind == "set":
                    put(holder, key, content)
                else:
                    _members(holder, content, appends=effect.kind == "append")

    def _number(self, source: tuple[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        kind, which = source
        if kind == "tensor":
            return tensors[which].item()
        if kind == "place":
            place = self.effects[which].place
            return _get(place.holder_now(), place.key)
        return which


def kind_of(item: Any) -> str:
    """Describe the properties of an object that code may check before it replaces the object."""
    if item is Change.MISSING:
        return "nothing"
    if isinstance(item, torch.Tensor):
        return f"{item.dtype} {tuple(item.shape)} {item.stride()} {item.device} {item.requires_grad}"
    return type(item).__name__


def _look(holder: Any, key: Any) -> Any:
    try:
        return _get(holder, key)
    except (LookupError, AttributeError, ValueError):
        return Change.MISSING


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, types.CellType):
        return holder.cell_contents
    if is_of(holder, dict):
        return item_of(holder, key)
    return getattr(holder, key) if _in_slot(holder, key) else attributes_of(holder)[key]


def put(holder: Any, key: Any, value: Any) -> None:
    """Put a value where a change was: into a cell, a dictionary, or the attributes of an object or class."""
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif is_of(holder, dict):
        builtin_of(holder).__setitem__(holder, key, value)
    elif is_of(holder, type) or _in_slot(holder, key):
        set_attribute(holder, key, value)
    else:
        attributes_of(holder)[key] = value


def _remove(holder: Any, key: Any) -> None:
    if is_of(holder, type) or _in_slot(holder, key):
        if _look(holder, key) is not Change.MISSING:
            set_attribute(holder, key, Change.MISSING)
    elif is_of(holder, dict):
        if _look(holder, key) is not Change.MISSING:
            builtin_of(holder).__delitem__(holder, key)
    else:
        attributes_of(holder).pop(key, None)


def _in_slot(holder: Any, key: Any) -> bool:
    return any(name == key for name, _ in slots_of(type(holder)))


def _members(holder: Any, items: Any, *, appends: bool) -> None:
    if not appends:
        builtin_of(holder).clear(holder)
    add(holder, items)
