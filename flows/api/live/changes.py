"""Lists what differs between two calls of a step, besides the contents of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from stowage.stages.workload import BatchSignature, ModelSignature
from stowage.stages.workload.signature import Leaf
from stowage.stages.workload.surroundings import MISSING, same_value, same_values

Changed = dict[str, tuple[Any, Any]]
"""Path -> the value before and the value now."""


class State(NamedTuple):
    """Everything that a step depends on except the contents of tensors."""

    batch: BatchSignature
    model: ModelSignature
    around: tuple[Any, ...]


def same_state(one: State, other: State) -> bool:
    """Return whether nothing differs between two calls."""
    return (
        (one.batch is other.batch or one.batch.leaves == other.batch.leaves)
        and (one.model is other.model or one.model == other.model)
        and same_values(one.around, other.around)
    )


def batch_changes(before: BatchSignature, now: BatchSignature) -> Changed | None:
    """Return what differs in the batch; None where its tensors have other forms."""
    if before.leaves == now.leaves:
        return {}
    mine, theirs = ({leaf.path: leaf for leaf in side.leaves} for side in (before, now))
    if tensor_forms(before) != tensor_forms(now):
        return None
    found: Changed = {}
    for path in mine.keys() | theirs.keys():
        old, new = mine.get(path), theirs.get(path)
        if old != new:
            found[path] = (_raw(old), _raw(new))
    return found


def tensor_forms(batch: BatchSignature) -> list[Leaf]:
    """Return the forms of a batch's tensors."""
    return [leaf for leaf in batch.leaves if leaf.kind == "tensor"]


def _raw(leaf: Leaf | None) -> Any:
    """Return a number as itself, anything else in words."""
    if leaf is None:
        return MISSING
    match leaf.kind:
        case "int":
            return int(leaf.value)
        case "float":
            return float(leaf.value)
        case "bool":
            return leaf.value == "True"
    return leaf.kind, leaf.value, leaf.same_as


def model_changes(before: ModelSignature, now: ModelSignature) -> Changed | None:
    """Return which attributes of the modules differ; None where the modules themselves differ."""
    if before == now:
        return {}
    if before.context != now.context or len(before.modules) != len(now.modules):
        return None
    found: Changed = {}
    for old, new in zip(before.modules, now.modules):
        if old == new:
            continue
        if old._replace(attributes=()) != new._replace(attributes=()):
            return None
        found.update(_attribute_changes(old.path, dict(old.attributes), dict(new.attributes)))
    return found


def _attribute_changes(path: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in old.keys() | new.keys():
        was, is_now = old.get(name, MISSING), new.get(name, MISSING)
        if not same_value(was, is_now):
            yield f"model.{path}.{name}" if path else f"model.{name}", (was, is_now)
