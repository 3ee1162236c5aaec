"""What a trace says that calls return, beside what they return."""

from __future__ import annotations

import functools
import math

import torch

from stowage.stages.ir.operators import OPAQUE
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE
from stowage.stages.kernels import Output, Outputs
from stowage.stages.profile.arguments import form_of, operator_of


def recorded_outputs(call: Call, trace: TraceTables) -> Outputs:
    """As the tables have them."""
    first: dict[int, int] = {}
    for position, read in enumerate(call.reads):
        first.setdefault(trace.values[read].storage, position)
    found: list[Output | None] = []
    for v in call.returns:
        if v < 0:
            found.append(None)
            continue
        value = trace.values[v]
        argument = first.get(value.storage, -1)
        found.append(Output(form_of(value), trace.storages[value.storage].nbytes if argument < 0 else 0, argument))
    return tuple(found)


def differ(real: Outputs, call: Call, trace: TraceTables) -> bool:
    """Whether a call returns something else than the tables say. What a step does without is not looked at, nor are
    tensors without elements."""
    recorded = recorded_outputs(call, trace)
    if len(real) != len(recorded):
        return False
    storages = [trace.values[read].storage for read in call.reads]
    for one, other in zip(real, recorded):
        if one is None or other is None or not (math.prod(other.form.shape) or one.nbytes):
            continue
        shared = [storages[o.argument] if o.argument >= 0 else -1 for o in (one, other)]
        same_form = one.form == other.form if shared[0] < 0 else one.form.stride == other.form.stride
        if shared[0] != shared[1] or not same_form or one.nbytes != other.nbytes:
            return True
    return False


def is_compared(call: Call) -> bool:
    """Whether it is a call of an operator that makes tensors, whose contents alone depend on its arguments'."""
    if call.is_view or not call.returns or call.target in (UPDATE, CLIP) or call.target in OPAQUE:
        return False
    return _makes_tensors(call.target)


@functools.cache
def _makes_tensors(target: str) -> bool:
    operator = operator_of(target)
    return (
        any(r.alias_info is None for r in operator._schema.returns)
        and torch.Tag.dynamic_output_shape not in operator.tags
    )
