"""Tables that `trace` writes: the whole training step, or a forward alone, as ATen calls over values in storages.

They are complete: no later stage needs the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from stowage.stages.ir.by_training import lies_by_training
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.results import places
from stowage.stages.ir.source import identifier, operator_name, role_of, word
from stowage.stages.ir.table import read_record, read_rows, write_record, write_rows

StorageRole = Literal["parameter", "buffer", "input", "constant", "outside", "state", "gradient", "temporary"]
"""Says who owns a storage.

`outside`: a tensor that belongs neither to the model nor to the batch (of a loss, a teacher, a memory bank), read where
it lives at each step.
`temporary`: made during the step. Everything else is in memory before the step, and after it too, except that a
`gradient` (the sum over earlier micro-batches, waiting in `.grad`) is freed once its parameter has been updated.
"""

Phase = Literal["forward", "backward", "update"]


ALIGNED = 64
"""Alignment granularity, in elements: for any type it is a multiple of a line of cache, 64 bytes."""


INSIDE = ".inside"
"""End of the names of temporary storages that one compute node makes and alone reads."""

AGAIN = ".again"
"""End of the names of storages that backward makes of what forward left, and may make several times."""


@dataclass(frozen=True)
class Storage:
    """One piece of memory; everything that shares it is freed together (aNode).

    Attributes:
        storage: position in the table.
        nbytes: bytes allocated.
        role: who owns it, see `StorageRole`.
        name: the parameter's, buffer's or input's name; `parameter::state` for optimizer states; else a short label.
    """

    storage: int
    nbytes: int
    role: StorageRole
    name: str


def form_text(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> str:
    """Return the text of `Value.form`."""
    return f"{dtype}[{'x'.join(map(str, shape))}][{','.join(map(str, stride))}]+{offset % ALIGNED}"


@dataclass(frozen=True)
class Value:
    """One tensor: a window on a storage.

    Attributes:
        value: position in the table.
        storage: the storage it lives in.
        call: the call that returns it, -1 for persistent values.
        output: which of the call's outputs it is.
        dtype: as in `torch.float32`, without `torch.`.
        shape, stride, offset: in elements.
        name: an identifier, unique, used in generated code.
        source: role and owner's name of a persistent value, `parameter:h.0.weight`; several may share a storage. A
            waiting gradient has its parameter's name, `gradient:h.0.weight`.
        on_host: it is in host memory, though the step computes on a GPU: a number that kernels take from there.
    """

    value: int
    storage: int
    call: int
    output: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    name: str
    source: str = ""
    on_host: bool = False

    @property
    def form(self) -> str:
        """Return what an operator's time depends on: type, shape, strides, and the alignment of the offset."""
        return form_text(self.dtype, self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Call:
    """One operator call.

    Attributes:
        call: position in execution order.
        target: `aten.addmm.default`; `stowage.update` for the optimizer's update of one parameter, `stowage.clip` for
            the scale of clipping by global norm (see `ir.updates`).
        arguments: JSON, see `ir.arguments`.
        reads: values among the arguments, in order of appearance.
        returns: values returned, -1 where an output is not a tensor.
        returns_many: the operator returns a list or tuple, even if of one.
        mutates: storages written in place (not those it creates).
        is_view: returns only windows on its inputs' storages and writes nothing.
        is_random: draws from the global generator.
        replay_arguments: JSON of the arguments to use when the call is executed again, where that differs: a batch
            normalisation must not update its running statistics twice. Empty otherwise.
        phase: part of the step, one of `Phase`.
        module: path of the module that made the call, "" at the top; for backward calls, of the forward call.
        location: `file:line` in the user's code, or "".
        signature: operator + the forms of tensors + sizes, dimensions and flags, not the numbers that it computes with;
            equal signatures cost the same (see `profile`).
        groups: how `returns` are grouped where some of the results are lists, see `ir.results`.
        function: which of PyTorch's backward functions makes the call, counted from 0: in eager mode what it reads and
            makes stays until it returns. Of a forward call, the function that makes its backward. −1 for none.
    """

    call: int
    target: str
    arguments: str
    reads: tuple[int, ...]
    returns: tuple[int, ...]
    returns_many: bool
    mutates: tuple[int, ...]
    is_view: bool
    is_random: bool
    replay_arguments: str
    phase: Phase
    module: str
    location: str
    signature: str
    groups: tuple[int, ...] = ()
    function: int = -1


@dataclass(frozen=True)
class Constant:
    """A constant tensor that the trace captured, with its bytes (little endian, contiguous)."""

    value: int
    content: bytes


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter.

    Attributes:
        parameter: name in `named_parameters()`.
        parameter_value, gradient_value: values; gradient -1 when the loss does not depend on the parameter. The
            gradient is this batch's own, even where one of earlier micro-batches waits.
    """

    parameter: str
    parameter_value: int
    gradient_value: int


@dataclass(frozen=True)
class TraceMeta:
    """The identity of a trace; `meta.json` beside the tables.

    Attributes:
        configuration_hash: hash of the training configuration: model structure, batch signature, trainable parameters,
            loss, optimizer class and device type.
        model: a label for people.
        device: `cpu` or `cuda`.
        torch_version: the version of torch whose operators the trace has.
        loss_value: the value that is the loss; -1 in a forward alone.
        optimizer: label of the optimizer, "" when gradients are left in `.grad`.
        parameters: number of scalar parameters.
        outputs: values that a forward alone returns.
        left: values that a step leaves in the user's objects.
    """

    configuration_hash: str
    model: str
    device: str
    torch_version: str
    loss_value: int
    optimizer: str
    parameters: int
    outputs: tuple[int, ...] = ()
    left: tuple[int, ...] = ()


def base_values(trace: TraceTables) -> dict[int, int]:
    """Return the first value that lives in each storage."""
    found: dict[int, int] = {}
    for value in trace.values:
        found.setdefault(value.storage, value.value)
    return found


@dataclass(frozen=True)
class TraceTables:
    """The whole trace: `calls` are in the order of eager PyTorch's execution, updates last."""

    storages: list[Storage]
    values: list[Value]
    calls: list[Call]
    gradients: list[Gradient]
    constants: list[Constant]
    meta: TraceMeta

    @cached_property
    def lies_by_training(self) -> bool:
        """Say whether some results have other strides than in `values`, by what trains."""
        return any(lies_by_training(call.target, call.arguments) for call in self.calls)

    def save(self, folder: Path) -> None:
        """Write every table into `folder`, each atomically."""
        write_rows(folder / "storages.parquet", Storage, self.storages)
        write_rows(folder / "values.parquet", Value, self.values)
        write_rows(folder / "calls.parquet", Call, self.calls)
        write_rows(folder / "gradients.parquet", Gradient, self.gradients)
        write_rows(folder / "constants.parquet", Constant, self.constants)
        write_record(folder / "meta.json", self.meta)

    @staticmethod
    def load(folder: Path) -> TraceTables:
        """Read what `save` wrote and check that the tables fit together.

        Raises:
            TableError: a file is missing, damaged, foreign, or the tables do not belong together.
        """
        trace = TraceTables(
            storages=read_rows(folder / "storages.parquet", Storage),
            values=read_rows(folder / "values.parquet", Value),
            calls=read_rows(folder / "calls.parquet", Call),
            gradients=read_rows(folder / "gradients.parquet", Gradient),
            constants=read_rows(folder / "constants.parquet", Constant),
            meta=read_record(folder / "meta.json", TraceMeta),
        )
        trace.check(folder)
        return trace

    def check(self, folder: Path | str = "trace") -> None:
        """Raise `TableError` unless every reference between tables holds and every value is read after it exists."""
        n_storages, n_values = len(self.storages), len(self.values)
        positions = (
            [s.storage for s in self.storages] == list(range(n_storages))
            and [v.value for v in self.values] == list(range(n_values))
            and [c.call for c in self.calls] == list(range(len(self.calls)))
        )
        made = [(v, call.call) for call in self.calls for v in call.returns if v >= 0]
        named = [*(self.meta.outputs or [self.meta.loss_value]), *(c.value for c in self.constants)]
        named += [v for g in self.gradients for v in (g.parameter_value, max(g.gradient_value, 0))]
        if (
            not positions
            or any(not 0 <= v.storage < n_storages for v in self.values)
            or any(not 0 <= s < n_storages for call in self.calls for s in call.mutates)
            or any(not 0 <= v < n_values for v in named)
            or len({v.name for v in self.values}) < n_values
            or sorted(made) != [(v.value, v.call) for v in self.values if v.call >= 0]
            or any(len(places(c.groups, len(c.returns))) != len(c.returns) for c in self.calls if c.groups)
        ):
            raise TableError(f"{folder}: the tables do not belong together: delete the folder and run `dvc repro`.")
        for value in self.values:
            word("dtype", value.dtype)
            identifier(value.name)
            if value.source:
                role_of(value.source)
        for call in self.calls:
            operator_name(f"{call.target}.of" if call.target.count(".") == 1 else call.target)
        exists = {v.value for v in self.values if v.call < 0}
        for call in self.calls:
            for read in call.reads:
                if read not in exists:
                    raise TableError(
                        f"{folder}: call {call.call} reads value {read} before it exists: run `dvc repro`."
                    )
            exists.update(v for v in call.returns if v >= 0)
