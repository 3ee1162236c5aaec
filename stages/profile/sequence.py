"""Runs a window of calls on made-up tensors, and times them one by one, or together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from stowage.stages.device import Clock, Device
from stowage.stages.ir.arguments import map_arguments
from stowage.stages.ir.operators import OPAQUE
from stowage.stages.ir.results import flat_results
from stowage.stages.ir.sums import takes_of, written_over
from stowage.stages.ir.trace import Call, TraceTables, Value
from stowage.stages.kernels import Form, made_up
from stowage.stages.kernels.failed import raise_if_failed
from stowage.stages.profile.arguments import (
    as_called,
    constant_of,
    form_of,
    is_sealed,
    kernel_of,
    place_of,
    sealed_outputs,
)
from stowage.stages.profile.indices import moved_inside
from stowage.stages.profile.line import Line, Read, resolve
from stowage.stages.profile.windows import Window
from stowage.stages.profile.written import Written, write

PATTERN = 1 << 16
"""Elements after which made-up contents repeat: drawing all of them would take longer than most calls."""

NOTHINGS = 1001
"""Number of empty calls that are timed."""


class WindowRun:
    """A window with its tensors, ready to run.

    Args:
        window: the calls.
        trace: the trace that the calls are from.
        last: the last call that touches each storage, see `last_touched`.
        device: times the calls.
        kind: the device's type, for PyTorch.

    Attributes:
        failing: signatures of calls that raised, because earlier calls made arguments outside their domain of made-up
            tensors. The calls after them take made-up results.
    """

    def __init__(
        self,
        window: Window,
        trace: TraceTables,
        last: Mapping[int, int],
        device: Device,
        kind: str,
    ) -> None:
        self._trace, self._device, self._target = trace, device, torch.device(kind)
        self.failing: set[str] = set()
        self._bent = False
        self._given = self._make(window)
        dead = _deaths(window, trace, last)
        self._lines = [
            Line(
                call.signature,
                call.target,
                kernel_of(call),
                *self._arguments(call),
                returns=tuple(call.returns),
                many=call.returns_many,
                groups=call.groups,
                opaque=call.target in OPAQUE,
                dead=dead.get(call.call, ()),
            )
            for call in (_as_in_step(c, trace, last) for c in window.calls)
        ]
        self._lead = window.lead

    def times(self) -> list[tuple[str, float]]:
        """Run the window; return signature and seconds of each timed call, `bookkeeping_s` included."""
        values = dict(self._given)
        clock = self._device.clock(len(self._lines))
        ended: list[bool] = []
        for line in self._lines:
            args, kwargs = _resolved(line, values)
            ended.append(self._timed(clock, line, args, kwargs, values))
        seconds = iter(clock.seconds())
        times = [next(seconds) if end else 0.0 for end in ended]
        return [(line.signature, time_s) for line, time_s in zip(self._lines, times, strict=True)][self._lead :]

    def _timed(self, clock: Clock, line: Line, args: list[Any], kwargs: dict[str, Any], values: dict[int, Any]) -> bool:
        """Time one call, and return whether it took its arguments."""
        try:
            self._bent |= moved_inside(line.target, args)
            clock.run(partial(_execute, line, args, kwargs, values))
        except Exception as problem:  # an operator may raise anything
            raise_if_failed(problem, line.target)
            self.failing.add(line.signature)
            for value in line.returns:
                if value >= 0:
                    made = self._trace.values[value]
                    values[value] = made_up(form_of(made), place_of(made, self._target))
            for value in line.dead:
                del values[value]
            return False
        return True

    def written(self) -> Written | None:
        """Return the timed calls as one function, if that is possible."""
        timed = self._lines[self._lead :]
        return None if self.failing or self._bent or any(line.opaque for line in timed) else write(timed)

    def written_s(self, written: Written) -> float:
        """Run the window with the timed calls as that function; return the seconds of all of them."""
        values = dict(self._given)
        for line in self._lines[: self._lead]:
            args, kwargs = _resolved(line, values)
            _execute(line, args, kwargs, values)
        args = [values[value] for value in written.reads]
        outlive: list[Any] = []
        return self._device.time_s(lambda: outlive.append(written.function(*args)), calls=len(self._lines))

    def _make(self, window: Window) -> dict[int, torch.Tensor]:
        """Make every value that calls of the window read and none of them makes."""
        made: set[int] = set()
        bases: dict[int, torch.Tensor] = {}
        found: dict[int, torch.Tensor] = {}
        for call in window.calls:
            for read in call.reads:
                if read not in made and read not in found:
                    found.update(self._given_values(self._trace.values[read], call, bases))
            made.update(call.returns)
        return found

    def _given_values(self, value: Value, reader: Call, bases: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        maker = self._trace.calls[value.call] if value.call >= 0 else None
        if maker is not None and is_sealed(maker, reader):
            return sealed_outputs(maker, self._trace, self._target)
        target = place_of(value, self._target)
        dtype = getattr(torch, value.dtype)
        if value.storage not in bases:
            elements = max(1, self._trace.storages[value.storage].nbytes // dtype.itemsize)
            few = made_up(Form(dtype, (min(elements, PATTERN),), (1,)), target)
            if self._trace.storages[value.storage].role == "parameter" and len(value.shape) > 1:
                few = _as_initialized(few, math.prod(value.shape[1:]))
            bases[value.storage] = few.repeat(-(-elements // PATTERN))[:elements]
        return {value.value: bases[value.storage].view(dtype).as_strided(value.shape, value.stride, value.offset)}

    def _arguments(self, call: Call) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = map_arguments(
            call.arguments,
            lambda key, content: Read(content) if key == "value" else constant_of(key, content, self._target),
        )
        return as_called(call, args), kwargs


def _as_in_step(call: Call, trace: TraceTables, last: Mapping[int, int]) -> Call:
    """Return the call as a step runs it: a sum takes the memory of a summand that nothing reads after it."""
    dying = [s for s in takes_of([call], trace) if last[s] == call.call]
    return written_over(call, dying[0], trace) if dying else call


def _as_initialized(weights: torch.Tensor, fan_in: int) -> torch.Tensor:
    """Scale weights to mean 0 and variance 1 / fan-in, about as models start.

    So results of a chain of calls stay as large as in a step. Sums of positive weights would not, and `exp` takes some
    times as long where it overflows.
    """
    if not (weights.is_floating_point() or weights.is_complex()):
        return weights
    return weights.sub_(weights.mean()).mul_(1 / weights.std()).mul_(1 / math.sqrt(max(fan_in, 1)))


def bookkeeping_s(device: Device) -> float:
    """Return the seconds that `WindowRun.times` adds to each call: the median of many that do nothing."""
    line = Line("", "", lambda left, right: left, [], {}, returns=(0,), dead=(0,))
    clock = device.clock(NOTHINGS)
    for _ in range(NOTHINGS):
        clock.run(partial(_execute, line, [1, 2], {}, {}))
    return statistics.median(clock.seconds())


def _resolved(line: Line, values: Mapping[int, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [resolve(a, values) for a in line.args], {name: resolve(a, values) for name, a in line.kwargs.items()}


def _execute(line: Line, args: list[Any], kwargs: dict[str, Any], values: dict[int, Any]) -> None:
    """Call the kernel, keep what it returns, and free what is not needed any more."""
    if line.opaque:
        with torch.enable_grad():
            result = line.kernel(*args, **kwargs)
    else:
        result = line.kernel(*args, **kwargs)
    args.clear()
    kwargs.clear()
    if line.groups:
        result = flat_results(result)
    made = zip(line.returns, result if line.many else (result,), strict=False)
    values.update({value: tensor for value, tensor in made if value >= 0})
    for value in line.dead:
        del values[value]


def last_touched(trace: TraceTables) -> dict[int, int]:
    """Return for each storage the last call of the step that reads or returns a value in it."""
    return {trace.values[v].storage: call.call for call in trace.calls for v in (*call.reads, *call.returns) if v >= 0}


def alive_bytes(trace: TraceTables, last: Mapping[int, int]) -> int:
    """Return the bytes that are alive in a step that keeps everything, averaged over its calls."""
    first: dict[int, int] = {}
    for call in trace.calls:
        for v in (*call.reads, *call.returns):
            if v >= 0:
                first.setdefault(trace.values[v].storage, call.call if trace.values[v].call >= 0 else 0)
    spans = ((trace.storages[s].nbytes, last[s] + 1 - begins) for s, begins in first.items())
    return sum(nbytes * span for nbytes, span in spans) // max(1, len(trace.calls))


def _deaths(window: Window, trace: TraceTables, last: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Return for each call the values made in the window whose storage no later call of the step touches."""
    inside = {call.call for call in window.calls}
    dead: dict[int, tuple[int, ...]] = {}
    for call in window.calls:
        for v in call.returns:
            if v >= 0 and (death := last[trace.values[v].storage]) in inside:
                dead[death] = (*dead.get(death, ()), v)
    return dead
