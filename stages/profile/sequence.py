"""Run a window of calls on made-up tensors, and time them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stowage.stages.device import Device
from stowage.stages.ir.arguments import map_arguments
from stowage.stages.ir.operators import OPAQUE
from stowage.stages.ir.trace import Call, TraceTables, Value
from stowage.stages.profile.arguments import constant_of, kernel_of, make_arguments, make_tensor, operator_of
from stowage.stages.profile.windows import Window

PATTERN = 1 << 16
"""Elements after which made-up contents repeat: drawing all of them would take longer than most calls."""


@dataclass(frozen=True)
class _Read:
    """Stands for a tensor among the arguments."""

    value: int


@dataclass(frozen=True)
class _Line:
    """One call, ready to run.

    Attributes:
        call: it.
        kernel: what a step calls for it.
        args, kwargs: of it, with `_Read` for tensors.
        dead: values that nothing reads after it.
        timed: it is not of the lead.
    """

    call: Call
    kernel: Any
    args: list[Any]
    kwargs: dict[str, Any]
    dead: tuple[int, ...]
    timed: bool


class WindowRun:
    """A window with its tensors.

    Args:
        window: the calls.
        trace: whose calls they are.
        last: as `last_touched` gives it.
        device: it times.
        kind: its type, for PyTorch.
        integers: made-up integers are below it.
    """

    def __init__(
        self,
        window: Window,
        trace: TraceTables,
        last: Mapping[int, int],
        device: Device,
        kind: str,
        *,
        integers: int,
    ) -> None:
        self._trace, self._device, self._target = trace, device, torch.device(kind)
        self._given = self._make(window, integers)
        dead = _deaths(window, trace, last)
        self._lines = [
            _Line(call, kernel_of(call), *self._arguments(call), dead.get(call.call, ()), position >= window.lead)
            for position, call in enumerate(window.calls)
        ]

    def times(self) -> list[tuple[str, float]]:
        """Run it: signature and seconds of each timed call."""
        values = dict(self._given)
        found: list[tuple[str, float]] = []
        for line in self._lines:
            args = [_found(a, values) for a in line.args]
            kwargs = {name: _found(a, values) for name, a in line.kwargs.items()}
            elapsed_s = self._device.time_s(partial(_execute, line, args, kwargs, values))
            if line.timed:
                found.append((line.call.signature, elapsed_s))
        return found

    def _make(self, window: Window, integers: int) -> dict[int, torch.Tensor]:
        """Every value that calls of the window read and none of them makes."""
        made: set[int] = set()
        bases: dict[int, torch.Tensor] = {}
        found: dict[int, torch.Tensor] = {}
        for call in window.calls:
            for read in call.reads:
                if read not in made and read not in found:
                    found.update(self._given_values(self._trace.values[read], bases, integers))
            made.update(call.returns)
        return found

    def _given_values(self, value: Value, bases: dict[int, torch.Tensor], integers: int) -> dict[int, torch.Tensor]:
        maker = self._trace.calls[value.call] if value.call >= 0 else None
        if maker is not None and maker.target in OPAQUE:
            args, kwargs = make_arguments(maker, self._trace, self._target, integers=integers)
            with torch.enable_grad():
                made = operator_of(maker.target)(*args, **kwargs)
            return {v: t for v, t in zip(maker.returns, made, strict=True) if v >= 0}
        dtype = getattr(torch, value.dtype)
        if value.storage not in bases:
            elements = max(1, self._trace.storages[value.storage].nbytes // dtype.itemsize)
            pattern = replace(value, shape=(min(elements, PATTERN),), stride=(1,), offset=0)
            few = make_tensor(pattern, self._target, integers=integers)
            bases[value.storage] = few.repeat(-(-elements // PATTERN))[:elements]
        return {value.value: bases[value.storage].view(dtype).as_strided(value.shape, value.stride, value.offset)}

    def _arguments(self, call: Call) -> tuple[list[Any], dict[str, Any]]:
        return map_arguments(
            call.arguments,
            lambda key, content: _Read(content) if key == "value" else constant_of(key, content, self._target),
        )


def _execute(line: _Line, args: list[Any], kwargs: dict[str, Any], values: dict[int, torch.Tensor]) -> None:
    """Call, keep what is returned, free what is not needed any more."""
    if line.call.target in OPAQUE:
        with torch.enable_grad():
            result = line.kernel(*args, **kwargs)
    else:
        result = line.kernel(*args, **kwargs)
    args.clear()
    kwargs.clear()
    results = result if line.call.returns_many else (result,)
    values.update((value, tensor) for value, tensor in zip(line.call.returns, results, strict=False) if value >= 0)
    for value in line.dead:
        del values[value]


def _found(argument: Any, values: dict[int, torch.Tensor]) -> Any:
    if type(argument) is _Read:
        return values[argument.value]
    if type(argument) is list:
        return [_found(a, values) for a in argument]
    return argument


def last_touched(trace: TraceTables) -> dict[int, int]:
    """Storage -> the last call of the step that reads or returns a value in it."""
    return {trace.values[v].storage: call.call for call in trace.calls for v in (*call.reads, *call.returns) if v >= 0}


def _deaths(window: Window, trace: TraceTables, last: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Call -> values made in the window whose storage no later call of the step touches; others stay to its end."""
    inside = {call.call for call in window.calls}
    dead: dict[int, tuple[int, ...]] = {}
    for call in window.calls:
        for v in call.returns:
            if v >= 0 and (death := last[trace.values[v].storage]) in inside:
                dead[death] = (*dead.get(death, ()), v)
    return dead
