"""Compares what a trace says that calls return with what they return."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from stowage.stages.ir.operators import OPAQUE
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE
from stowage.stages.kernels import Output, Outputs, output_at
from stowage.stages.profile.arguments import form_of, operator_of


def recorded_outputs(call: Call, trace: TraceTables) -> Outputs:
    """Return a call's outputs as the tables have them."""
    first: dict[int, int] = {}
    for position, read in enumerate(call.reads):
        first.setdefault(trace.values[read].storage, position)
    found: list[Output | None] = []
    leader: dict[int, int] = {}
    for i, v in enumerate(call.returns):
        if v < 0:
            found.append(None)
            continue
        value = trace.values[v]
        argument, other = first.get(value.storage, -1), leader.setdefault(value.storage, i)
        nbytes = trace.storages[value.storage].nbytes
        found.append(output_at(form_of(value), nbytes, argument, other if other < i else -1))
    return tuple(found)


def differ(real: Outputs, call: Call, trace: TraceTables) -> bool:
    """Return whether a call returns something else than the tables say.

    Results that a step ignores are not compared, nor are tensors without elements.
    """
    recorded = recorded_outputs(call, trace)
    if len(real) != len(recorded):
        return False
    storages = [trace.values[read].storage for read in call.reads]
    both = [i for i, pair in enumerate(zip(real, recorded)) if None not in pair]
    for one, other in zip(_among(real, both), _among(recorded, both)):
        if not (math.prod(other.form.shape) or math.prod(one.form.shape) or one.nbytes):
            continue
        shared = [storages[o.argument] if o.argument >= 0 else -1 for o in (one, other)]
        same_form = one.form == other.form if shared[0] < 0 else one.form.stride == other.form.stride
        if shared[0] != shared[1] or not same_form or (one.nbytes, one.output) != (other.nbytes, other.output):
            return True
    return False


def _among(outputs: Outputs, positions: Sequence[int]) -> list[Output]:
    """Return the outputs at some positions, as if there were no others."""
    found: list[Output] = []
    first: dict[int, int] = {}
    for i in positions:
        output = outputs[i]
        assert output is not None
        owner = outputs[output.output] if output.output >= 0 else output
        assert owner is not None
        leader = first.setdefault(output.output if output.output >= 0 else i, i)
        found.append(output_at(output.form, owner.nbytes, output.argument, leader if leader < i else -1))
    return found


def is_compared(call: Call) -> bool:
    """Return whether a call's outputs are to be compared: its operator makes tensors from its arguments alone."""
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
