"""Lists every tensor and every plain value of a batch, in a fixed order, with the Python expression that reaches it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from stowage.stages.ir.errors import ParameterError
from stowage.stages.structure.containers import contents, length_of
from stowage.stages.structure.kinds import Kind, kind_of, steps

LIMIT = 100_000
"""The most parts that a batch may have: an object that reaches more is no batch."""
DEPTH = 64
RUN = 32
"""The longest sequence of plain values that is listed value by value; a longer one (token ids) is one part."""


class Part(NamedTuple):
    """A tensor, a plain value, a container or an object inside a batch.

    Attributes:
        path: the Python expression that reaches it: `batch['labels']`, `batch.inner.mask`.
        label: the same without the name of the batch: `labels`, `inner.mask`.
        kind: how it is treated, see `Kind`.
        item: the part itself.
        same_as: path of an earlier part that is the same tensor, or the same object with tensors inside; "" for none.
    """

    path: str
    label: str
    kind: Kind
    item: Any
    same_as: str


class Walk:
    """One walk over a batch.

    Attributes:
        parts: the parts that were found, in order.
        holding: identities of objects with tensors inside.
        first: identity of a tensor, or of an object in `holding`, -> the path where it was met first.
    """

    def __init__(self, batch: Any, name: str) -> None:
        self.parts: list[Part] = []
        self.holding: set[int] = set()
        self.first: dict[int, str] = {}
        self._open: set[int] = set()
        self._name = name
        self._visit(batch, name, "", 0, False, False)

    def _visit(self, item: Any, path: str, label: str, depth: int, mirrors: bool, hidden: bool) -> bool:
        """Add the item and everything inside; return whether there is a tensor inside."""
        kind = kind_of(type(item))
        if kind in ("tensor", "plain", "array", "closed"):
            earlier = self.first.setdefault(id(item), path) if kind == "tensor" else path
            if not (mirrors and earlier != path):
                self._add(path, label, kind, item, "" if earlier == path else earlier)
            return kind == "tensor"
        known = id(item)
        if known in self.holding or known in self._open:
            if not mirrors:
                self._add(path, label, kind, item, self.first[known])
            return True
        self.first[known] = path
        if kind == "sequence" and length_of(item) > RUN and all(kind_of(type(v)) == "plain" for v in contents(item)):
            self._add(path, label, "plain", item, "")
            return False
        if depth == DEPTH:
            self._add(path, label, "closed", item, "")
            return False
        if not hidden:
            self._add(path, label, kind, item, "")
        self._open.add(known)
        inside = False
        for step in steps(item, kind):
            deeper = f"{label}.{step.label}" if label and step.label else label or step.label
            inside |= self._visit(step.item, path + step.path, deeper, depth + 1, step.mirrors, not step.path)
        self._open.discard(known)
        if inside:
            self.holding.add(known)
        return inside

    def _add(self, path: str, label: str, kind: Kind, item: Any, same_as: str) -> None:
        if len(self.parts) == LIMIT:
            raise ParameterError(
                f"{self._name} reaches more than {LIMIT:,} objects (at {path}): pass tensors, numbers and strings, and "
                "what belongs to all batches outside."
            )
        self.parts.append(Part(path, label, kind, item, same_as))


def parts(batch: Any, name: str = "batch") -> list[Part]:
    """List everything in a batch, outermost first, each container before its content.

    Raises:
        ParameterError: the batch reaches more objects than a batch may.
    """
    return Walk(batch, name).parts


def leaves(batch: Any) -> list[tuple[str, torch.Tensor]]:
    """List the tensors of a batch, each with a unique label: `input_ids`, `0`, `parts.1`, `inner.mask`.

    A tensor that is there twice is listed twice.
    """
    found: dict[str, torch.Tensor] = {}
    for part in parts(batch):
        if part.kind == "tensor":
            label = part.label or "batch"
            while label in found:
                label += "'"
            found[label] = part.item
    return list(found.items())


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """List the tensors of a batch, in the order of `leaves`."""
    return [part.item for part in parts(batch) if part.kind == "tensor"]
