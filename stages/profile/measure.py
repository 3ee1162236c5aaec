"""Runs one call by itself, and measures the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stowage.stages.device import Device
from stowage.stages.ir.by_training import BY_TRAINING
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.flags import asked_for, flag_count, made_anyway
from stowage.stages.ir.operators import OPAQUE
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.kernels import ContentKind, Outputs, kinds_of, outputs_of
from stowage.stages.kernels.failed import raise_if_failed
from stowage.stages.profile.arguments import kernel_of, make_arguments, tensors_in
from stowage.stages.profile.indices import moved_inside
from stowage.stages.profile.returned import is_compared


@dataclass(frozen=True)
class Alone:
    """One call by itself, measured.

    Attributes:
        output_bytes: bytes of storages that it creates.
        workspace_bytes: peak bytes above inputs and outputs.
        work: executes it on made-up tensors.
        outputs: its outputs, if they are to be compared, see `is_compared`.
        flagged_bytes: its workspace by its flags, if it has some, see `ir.flags`.
    """

    output_bytes: int
    workspace_bytes: int
    work: Callable[[], Any]
    outputs: Outputs | None = None
    flagged_bytes: tuple[int, ...] = ()


class MadeUpError(Exception):
    """Raised when a call takes none of the made-up contents that were tried: an estimate must do."""


def measured(work: Callable[[], Any], device: Device) -> Alone:
    """Measure the memory of `work` twice: the first execution may need other workspace than those after it."""
    first, steady = (_memory(work, device) for _ in range(2))
    return Alone(steady[0], max(first[1], steady[1], 0), work)


def _memory(work: Callable[[], Any], device: Device) -> tuple[int, int]:
    """Return the bytes of what it returns, and the most above them."""
    memory = device.measure(work)
    return memory.end_bytes, memory.peak_bytes - max(memory.end_bytes, 0)


def returned(call: Call, trace: TraceTables, kind: str) -> Outputs | None:
    """Return what `call` returns on made-up tensors; None if it is not to be compared, or takes none of them."""
    if not is_compared(call):
        return None
    operator, target = _operator(call), torch.device(kind)
    for contents in kinds_of(call.target):
        try:
            args, kwargs = _inside(call, trace, target, contents)
            return outputs_of(operator(*args, **kwargs), tensors_in(args, kwargs))
        except Exception as problem:  # an operator may raise anything at contents outside its domain
            raise_if_failed(problem, call.target)
    return None


def measure_call(call: Call, trace: TraceTables, device: Device, kind: str) -> Alone:
    """Run `call` on made-up tensors.

    Raises:
        TableError: the operator does not run on this device.
        MadeUpError: it takes none of the contents that were tried.
    """
    operator, target = _operator(call), torch.device(kind)
    error: Exception | None = None
    for contents in kinds_of(call.target):
        try:
            args, kwargs = _inside(call, trace, target, contents)
            result = operator(*args, **kwargs)  # libraries take workspaces at the first call, and keep them
            outputs = outputs_of(result, tensors_in(args, kwargs)) if is_compared(call) else None
            del result
            ignored = [o.nbytes if o and v < 0 else 0 for o, v in zip(outputs or (), call.returns)]
            if flag_count(call.target, call.arguments):
                alone = _flagged(call, partial(operator, **kwargs), args, ignored, device, kind)
                return replace(alone, outputs=outputs)
            alone = replace(measured(partial(operator, *args, **kwargs), device), outputs=outputs)
            return _without(alone, sum(ignored))
        except NotImplementedError as problem:
            raise TableError(f"The call {call.target} of the trace does not run on this device: {problem}.") from None
        except Exception as problem:  # these contents are outside its domain; the next kind may do
            raise_if_failed(problem, call.target)
            error = error or problem
    raise MadeUpError(str(error))


def _flagged(
    call: Call, operator: Callable[..., Any], args: Sequence[Any], ignored: Sequence[int], device: Device, kind: str
) -> Alone:
    """Measure a call under each choice of its flags; `ignored` has the bytes of the results that the step drops."""
    if call.target in BY_TRAINING:
        ways = [_without(measured(partial(operator, *args[:-1], flag), device), sum(ignored)) for flag in (False, True)]
        return replace(ways[bool(args[-1])], flagged_bytes=tuple(one.workspace_bytes for one in ways))
    found: list[Alone] = []
    asked, anyway = asked_for(call.arguments), made_anyway(call.target, kind)
    anyway_bytes = operator(*args)[anyway].nbytes if anyway >= 0 else 0
    for position in range(1 << len(asked)):  # none too: a row that makes several calls may run for another
        wanted = {result for i, result in enumerate(asked) if position >> i & 1}
        last = [result in wanted or result == anyway for result in range(len(args[-1]))]
        dropped_bytes = sum(nbytes for result, nbytes in enumerate(ignored) if result in wanted)
        dropped_bytes += 0 if anyway in wanted else anyway_bytes
        found.append(_without(measured(partial(operator, *args[:-1], last), device), dropped_bytes))
    return replace(found[-1], flagged_bytes=tuple(one.workspace_bytes for one in found))


def _without(alone: Alone, nbytes: int) -> Alone:
    """Count so many bytes of the results as workspace: a step ignores these results and drops them at once."""
    return replace(alone, output_bytes=alone.output_bytes - nbytes, workspace_bytes=alone.workspace_bytes + nbytes)


def _inside(
    call: Call, trace: TraceTables, target: torch.device, contents: ContentKind
) -> tuple[list[Any], dict[str, Any]]:
    """Make arguments whose indices point into what they index: on a GPU others end the process."""
    args, kwargs = make_arguments(call, trace, target, contents)
    moved_inside(call.target, args)
    return args, kwargs


def _operator(call: Call) -> Callable[..., Any]:
    kernel = kernel_of(call)

    def with_gradients(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return kernel(*args, **kwargs)

    return with_gradients if call.target in OPAQUE else kernel
