"""What `trace` writes: the whole training step as ATen calls over values that live in storages. Complete: nothing
downstream needs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StorageRole = Literal["parameter", "buffer", "input", "constant", "state", "temporary"]
"""`temporary`: made during the step. Everything else is persistent: in memory before and after the step."""

Phase = Literal["forward", "backward", "update"]


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


@dataclass(frozen=True)
class Call:
    """One operator call.

    Attributes:
        call: position in execution order.
        target: `aten.addmm.default`, or `stowage.update` for the optimizer's update of one parameter.
        arguments: JSON, see `ir.arguments`.
        reads: values among the arguments, in order of appearance.
        returns: values returned, -1 where an output is not a tensor.
        mutates: storages written in place (not those it creates).
        is_view: returns only windows on its inputs' storages and writes nothing.
        is_random: draws from the global generator.
        replay_arguments: JSON of the arguments to use when the call is executed again, where that differs: a batch
            normalisation must not update its running statistics twice. Empty otherwise.
        phase: see `Phase`.
        module: path of the module that made the call, "" at the top; for backward calls, of the forward call.
        location: `file:line` in the user's code, or "".
        signature: operator + dtypes + shapes + strides + constants; equal signatures cost the same (see `profile`).
    """

    call: int
    target: str
    arguments: str
    reads: tuple[int, ...]
    returns: tuple[int, ...]
    mutates: tuple[int, ...]
    is_view: bool
    is_random: bool
    replay_arguments: str
    phase: Phase
    module: str
    location: str
    signature: str


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
        parameter_value, gradient_value: values; gradient -1 when the loss does not depend on the parameter.
    """

    parameter: str
    parameter_value: int
    gradient_value: int
