"""Rewrites dropout masks so that they are kept as bytes.

On a CPU dropout draws a mask of the activation's own type: `empty`, `bernoulli_(1 − p)`, `div_(1 − p)`. Kept for
backward it takes four bytes per element although it carries one bit; drawing it again costs a random number per
element. The rewrite puts one byte per element between the two:

    raw = empty; bernoulli_(raw)      the draw, freed at once
    bits = raw as uint8               what is worth keeping
    mask = bits as float; div_(mask)  cheap to make again

`bernoulli_` gives exactly 0 or 1, so `mask` has the same bits as before.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from stowage.stages.ir.trace import Call, Storage, TraceTables, Value

_FACTORIES = ("aten.empty_strided.default", "aten.empty.memory_format")
_DRAW, _SCALE = "aten.bernoulli_.float", "aten.div_.Scalar"


@dataclass(frozen=True)
class _Mask:
    """The three calls that make one mask."""

    make: Call
    draw: Call
    scale: Call


def _find_masks(trace: TraceTables) -> list[_Mask]:
    readers: dict[int, list[Call]] = defaultdict(list)
    for call in trace.calls:
        for value in set(call.reads):
            readers[value].append(call)
    found: list[_Mask] = []
    for draw in trace.calls:
        if draw.target != _DRAW or len(draw.reads) != 1 or len(draw.returns) != 1:
            continue
        drawn = trace.values[draw.reads[0]]
        make = trace.calls[drawn.call] if drawn.call >= 0 else None
        scales = readers[draw.returns[0]]
        alone = make is not None and make.target in _FACTORIES and readers[drawn.value] == [draw]
        if alone and len(scales) == 1 and scales[0].target == _SCALE and not scales[0].is_random:
            assert make is not None
            found.append(_Mask(make, draw, scales[0]))
    return found


def mask_draws(trace: TraceTables) -> list[int]:
    """Return the calls that draw a mask, in order."""
    return [mask.draw.call for mask in _find_masks(trace)]


def pack_masks(trace: TraceTables, where: Callable[[Call], bool] = lambda call: True) -> TraceTables:
    """Return the trace with dropout masks kept as bytes; the trace itself where it has none.

    Args:
        trace: the trace as it was recorded.
        where: says whether to pack the mask that a call draws; by default every mask is packed.
    """
    masks = [mask for mask in _find_masks(trace) if where(mask.draw)]
    if not masks:
        return trace
    storages, values = list(trace.storages), list(trace.values)
    by_scale = {mask.scale.call: mask for mask in masks}
    raw_of: dict[int, int] = {}
    inserted: dict[int, tuple[Call, Call]] = {}
    replaced: dict[int, Call] = {}
    for mask in masks:
        raw, bits, unpacked = _new_values(trace, mask, storages, values)
        raw_of[mask.draw.call] = raw
        replaced[mask.draw.call] = replace(mask.draw, mutates=(raw,))
        inserted[mask.scale.call] = (
            _copy(mask, values, read=mask.draw.returns[0], returned=bits),
            _copy(mask, values, read=bits, returned=unpacked),
        )
        old = f'{{"value":{mask.draw.returns[0]}}}'
        replaced[mask.scale.call] = replace(
            mask.scale,
            arguments=mask.scale.arguments.replace(old, f'{{"value":{unpacked}}}'),
            reads=tuple(unpacked if v == mask.draw.returns[0] else v for v in mask.scale.reads),
        )
    calls: list[Call] = []
    number: dict[int, int] = {}
    for call in trace.calls:
        for extra in inserted.get(call.call, ()) if call.call in by_scale else ():
            calls.append(replace(extra, call=len(calls)))
        number[call.call] = len(calls)
        calls.append(replace(replaced.get(call.call, call), call=len(calls)))
    made = {v: call.call for call in calls for v in call.returns if v >= 0 and _is_new(v, trace)}
    values = [
        replace(v, call=made.get(v.value, number.get(v.call, -1)) if v.call >= 0 or v.value in made else -1)
        for v in values
    ]
    packed = replace(trace, storages=storages, values=values, calls=calls)
    packed.check("packed masks")
    return packed


def _is_new(value: int, trace: TraceTables) -> bool:
    return value >= len(trace.values)


def _new_values(trace: TraceTables, mask: _Mask, storages: list[Storage], values: list[Value]) -> tuple[int, int, int]:
    """Give the draw a storage of its own; add the bits and the unpacked mask. Return raw storage, bits, unpacked."""
    drawn = values[mask.draw.returns[0]]
    storage_of_value = trace.storages[drawn.storage]
    elements = math.prod(drawn.shape)
    raw = Storage(len(storages), storage_of_value.nbytes, "temporary", f"{storage_of_value.name}.draw")
    kept = Storage(len(storages) + 1, elements, "temporary", f"{storage_of_value.name}.bits")
    storages += [raw, kept]
    for value in (mask.make.returns[0], mask.draw.returns[0]):
        values[value] = replace(values[value], storage=raw.storage)
    bits = replace(
        drawn, value=len(values), storage=kept.storage, dtype="uint8", call=0, name=f"{drawn.name}bits", offset=0
    )
    values.append(bits)
    unpacked = replace(drawn, value=len(values), storage=storage_of_value.storage, call=0, name=f"{drawn.name}mask")
    values.append(unpacked)
    return raw.storage, bits.value, unpacked.value


def _copy(mask: _Mask, values: list[Value], *, read: int, returned: int) -> Call:
    """Make a copy into the type of the returned value; its number is filled in later."""
    keywords = {"dtype": {"dtype": values[returned].dtype}}
    arguments = json.dumps({"args": [{"value": read}], "kwargs": keywords}, separators=(",", ":"))
    target = "aten._to_copy.default"
    return Call(
        call=-1,
        target=target,
        arguments=arguments,
        reads=(read,),
        returns=(returned,),
        returns_many=False,
        mutates=(),
        is_view=False,
        is_random=False,
        replay_arguments="",
        phase=mask.draw.phase,
        module=mask.draw.module,
        location=mask.draw.location,
        signature=target + re.sub(r'\{"value":\d+\}', f'"{values[read].form}"', arguments),
    )
