"""Takes a model's outputs apart into tensors and everything around them, and puts them together again."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import TraceError

_AS_THEY_ARE = (type, nn.Module, types.FunctionType, types.MethodType, types.ModuleType)
"""Classes whose objects are not copied but handed on."""


@dataclass(frozen=True)
class OutputForm:
    """An output of any class (a `ModelOutput`, a cache of keys and values) with placeholders for its tensors.

    It never leaves the process.

    Attributes:
        content: the pickled output; a placeholder in it is the position of its tensor.
        kept: objects that are not copied but handed on, by position.
    """

    content: bytes
    kept: tuple[Any, ...]

    @staticmethod
    def of(outputs: Any) -> tuple[OutputForm, list[torch.Tensor]]:
        """Return the form of an output, and its distinct tensors.

        Raises:
            TraceError: there is no tensor in it, or something that cannot be made again.
        """
        sink = io.BytesIO()
        apart = _Apart(sink)
        try:
            apart.dump(outputs)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            raise TraceError(
                f"The model returns a {type(outputs).__name__} that cannot be made again for each batch ({error}): "
                "return tensors, or lists, tuples, dictionaries or dataclasses of them."
            ) from error
        if not apart.tensors:
            raise TraceError(
                f"The model returns a {type(outputs).__name__} without a tensor: nothing is to be planned."
            )
        return OutputForm(sink.getvalue(), tuple(apart.kept)), apart.tensors

    @staticmethod
    def with_numbers(item: Any) -> tuple[OutputForm, list[torch.Tensor], list[int | float]]:
        """Return the form of any object, its tensors, and its numbers except booleans; they leave placeholders too.

        Raises:
            pickle.PicklingError, TypeError, AttributeError, RuntimeError: it cannot be made again.
        """
        sink = io.BytesIO()
        apart = _Apart(sink, numbers=True)
        apart.dump(item)
        return OutputForm(sink.getvalue(), tuple(apart.kept)), apart.tensors, apart.numbers

    @staticmethod
    def kept_whole(item: Any) -> OutputForm:
        """Return a form that hands an object on as it is."""
        sink = io.BytesIO()
        apart = _Whole(sink)
        apart.dump(item)
        return OutputForm(sink.getvalue(), (item,))

    def fill(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float] = ()) -> Any:
        """Build a new output around these tensors and numbers, in the order in which they were found."""
        return _Together(self.content, tensors, self.kept, numbers).load()


class _Apart(pickle.Pickler):
    def __init__(self, sink: io.BytesIO, *, numbers: bool = False) -> None:
        super().__init__(sink)
        self.tensors: list[torch.Tensor] = []
        self.kept: list[Any] = []
        self.numbers: list[int | float] = []
        self._with_numbers = numbers
        self._seen: dict[int, int] = {}

    def persistent_id(self, item: Any) -> str | None:  # a string: pickle would call this on the parts of a tuple
        if self._with_numbers and type(item) in (int, float):
            self.numbers.append(item)
            return f"number {len(self.numbers) - 1}"
        if isinstance(item, torch.Tensor):
            return f"tensor {self._number(item, self.tensors)}"
        if isinstance(item, _AS_THEY_ARE):
            return f"kept {self._number(item, self.kept)}"
        return None

    def _number(self, item: Any, found: list[Any]) -> int:
        if id(item) not in self._seen:
            self._seen[id(item)] = len(found)
            found.append(item)
        return self._seen[id(item)]


class _Whole(pickle.Pickler):
    def persistent_id(self, item: Any) -> str:
        return "kept 0"


class _Together(pickle.Unpickler):
    def __init__(
        self,
        content: bytes,
        tensors: Sequence[torch.Tensor],
        kept: tuple[Any, ...],
        numbers: Sequence[int | float] = (),
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._found: dict[str, Sequence[Any]] = {"tensor": tensors, "kept": kept, "number": numbers}

    def persistent_load(self, hole: str) -> Any:
        kind, _, number = hole.partition(" ")
        return self._found[kind][int(number)]
