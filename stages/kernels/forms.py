"""Type, shape, strides and storage of a tensor, without its contents."""

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
        """The form of a tensor, real or fake."""
        return Form(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def span(self) -> int:
        """Elements from the start of the storage to the last one that the tensor reaches."""
        if not all(self.shape):
            return 0
        return 1 + self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride))


@dataclass(frozen=True)
class Output:
    """What a call returns.

    Attributes:
        form: of the tensor.
        nbytes: of its storage, 0 where it shares one.
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
        """For tables; `parse` reads it."""
        form = self.form
        dtype = str(form.dtype).removeprefix("torch.")
        shape, stride = (",".join(map(str, numbers)) for numbers in (form.shape, form.stride))
        return f"{dtype} {shape or '-'} {stride or '-'} {form.offset} {self.nbytes} {self.argument} {self.output}"

    @staticmethod
    def parse(text: str) -> Output:
        """What `text` says."""
        dtype, shape, stride, offset, nbytes, argument, output = text.split(" ")
        form = Form(getattr(torch, word("dtype", dtype)), _numbers(shape), _numbers(stride), int(offset))
        return Output(form, int(nbytes), int(argument), int(output))


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "-" else tuple(map(int, text.split(",")))


def texts(outputs: Iterable[Output | None]) -> tuple[str, ...]:
    """For tables: "" where there is no tensor."""
    return tuple("" if output is None else output.text for output in outputs)


def parse_all(found: Iterable[str]) -> tuple[Output | None, ...]:
    """What `texts` wrote."""
    return tuple(Output.parse(text) if text else None for text in found)


def outputs_of(result: Any, tensors: Sequence[torch.Tensor]) -> tuple[Output | None, ...]:
    """What a call with these tensors among its arguments returned."""
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
    """An output whose storage has so many bytes, and is that of an argument or of an output before it, -1 for none."""
    if argument >= 0:
        return Output(form, 0, argument)
    return Output(form, nbytes if output < 0 else 0, output=output)
