"""Describes a tensor without its contents: dtype, shape, strides and storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stowage.stages.ir.results import flat_results
from stowage.stages.ir.source import word


@dataclass(frozen=True)
class Form:
    """A tensor without contents.

    Attributes:
        dtype: its type.
        shape, stride, offset: in elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """Return the form of a tensor, real or fake."""
        return Form(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def span(self) -> int:
        """Return the number of elements from the start of the storage to the last one that the tensor reaches."""
        if not all(self.shape):
            return 0
        return 1 + self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride))


@dataclass(frozen=True)
class Output:
    """One tensor that a call returns.

    Attributes:
        form: the form of the tensor.
        nbytes: the bytes of its storage, 0 where it shares another's.
        argument: position, among the tensors of the arguments, of the one whose storage it shares; -1 for none.
        output: position, among the outputs, of the first one whose storage it shares, where that is no argument's; -1
            for none and for the first one itself.
    """

    form: Form
    nbytes: int
    argument: int = -1
    output: int = -1

    @property
    def text(self) -> str:
        """Return the output as text for tables; `parse` reads it."""
        form = self.form
        dtype = str(form.dtype).removeprefix("torch.")
        shape, stride = (",".join(map(str, numbers)) for numbers in (form.shape, form.stride))
        return f"{dtype} {shape or '-'} {stride or '-'} {form.offset} {self.nbytes} {self.argument} {self.output}"

    @staticmethod
    def parse(text: str) -> Output:
        """Return the output that `text` was written from."""
        dtype, shape, stride, offset, nbytes, argument, output = text.split(" ")
        form = Form(getattr(torch, word("dtype", dtype)), _numbers(shape), _numbers(stride), int(offset))
        return Output(form, int(nbytes), int(argument), int(output))


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "-" else tuple(map(int, text.split(",")))


def texts(outputs: Iterable[Output | None]) -> tuple[str, ...]:
    """Return the outputs as text for tables, "" where an output is no tensor."""
    return tuple("" if output is None else output.text for output in outputs)


def parse_all(found: Iterable[str]) -> tuple[Output | None, ...]:
    """Return the outputs that `texts` wrote."""
    return tuple(Output.parse(text) if text else None for text in found)


def outputs_of(result: Any, tensors: Sequence[torch.Tensor]) -> tuple[Output | None, ...]:
    """Describe what a call with these tensors among its arguments returned."""
    positions: dict[int, int] = {}
    for i, tensor in enumerate(tensors):
        positions.setdefault(tensor.untyped_storage()._cdata, i)
    found: list[Output | None] = []
    first: dict[int, int] = {}
    for i, tensor in enumerate(flat_results(result)):
        if not isinstance(tensor, torch.Tensor):
            found.append(None)
            continue
        storage = tensor.untyped_storage()
        argument, other = positions.get(storage._cdata, -1), first.setdefault(storage._cdata, i)
        found.append(output_at(Form.of(tensor), int(storage.nbytes()), argument, other if other < i else -1))
    return tuple(found)


def output_at(form: Form, nbytes: int, argument: int, output: int) -> Output:
    """Return an output with a storage of its own, or one that shares the storage of an argument or earlier output.

    Args:
        form: the form of the output.
        nbytes: the bytes of its storage.
        argument: the position of the argument that shares the storage; -1 for none.
        output: the position of the earlier output that shares the storage; -1 for none.
    """
    if argument >= 0:
        return Output(form, 0, argument)
    return Output(form, nbytes if output < 0 else 0, output=output)
