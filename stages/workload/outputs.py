"""What a model returns, taken apart: its tensors, and everything around them."""

from __future__ import annotations

import io
import pickle
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import TraceError

_AS_THEY_ARE = (type, nn.Module, types.FunctionType, types.MethodType, types.ModuleType)
"""Not made again, but handed on."""


@dataclass(frozen=True)
class OutputForm:
    """Containers and numbers of an output, of any class (a `ModelOutput`, a cache of keys and values), with holes where
    its tensors were. It never leaves the process.

    Attributes:
        content: pickled; a hole is the position of its tensor.
        kept: what is not made again but handed on, by position.
    """

    content: bytes
    kept: tuple[Any, ...]

    @staticmethod
    def of(outputs: Any) -> tuple[OutputForm, list[torch.Tensor]]:
        """The form of an output, and its distinct tensors.

        Raises:
            TraceError: there is no tensor in it, or something that cannot be made again.
        """
        sink = io.BytesIO()
        apart = _Apart(sink)
        try:
            apart.dump(outputs)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TraceError(
                f"The model returns a {type(outputs).__name__} that cannot be made again for each batch ({error}): "
                "return tensors, or lists, tuples, dictionaries or dataclasses of them."
            ) from error
        if not apart.tensors:
            raise TraceError(
                f"The model returns a {type(outputs).__name__} without a tensor: nothing is to be planned."
            )
        return OutputForm(sink.getvalue(), tuple(apart.kept)), apart.tensors

    def fill(self, tensors: list[torch.Tensor]) -> Any:
        """A new output around these tensors, in the order in which `of` gave them."""
        return _Together(self.content, tensors, self.kept).load()


class _Apart(pickle.Pickler):
    def __init__(self, sink: io.BytesIO) -> None:
        super().__init__(sink)
        self.tensors: list[torch.Tensor] = []
        self.kept: list[Any] = []
        self._seen: dict[int, int] = {}

    def persistent_id(self, item: Any) -> tuple[str, int] | None:
        if isinstance(item, torch.Tensor):
            return "tensor", self._number(item, self.tensors)
        if isinstance(item, _AS_THEY_ARE):
            return "kept", self._number(item, self.kept)
        return None

    def _number(self, item: Any, found: list[Any]) -> int:
        if id(item) not in self._seen:
            self._seen[id(item)] = len(found)
            found.append(item)
        return self._seen[id(item)]


class _Together(pickle.Unpickler):
    def __init__(self, content: bytes, tensors: list[torch.Tensor], kept: tuple[Any, ...]) -> None:
        super().__init__(io.BytesIO(content))
        self._found = {"tensor": tensors, "kept": kept}

    def persistent_load(self, hole: tuple[str, int]) -> Any:
        kind, number = hole
        return self._found[kind][number]
