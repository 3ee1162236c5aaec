"""Drops from a lowered step what nothing needs, takes equal constants together, and numbers what is left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from stowage.stages.ir.trace import Call, Constant, Gradient, Storage, Value
from stowage.stages.trace.lower import Lowering
from stowage.stages.trace.recording.record import LEFT

_CONSTANT_ROLES = ("input", "buffer", "constant", "outside")


def merge_equal_constants_of_step(calls: list[Call], values: list[Value], storages: list[Storage]) -> dict[int, int]:
    """Find equal calls that read nothing but each other's results and constants of the step (masks, positions).

    Return a map from value to the earlier value that equals it bit for bit. Every layer of a Transformer builds the
    same mask; one is enough. Calls that are random, that mutate, or whose storage is ever written are left alone.
    """
    written = {s for call in calls for s in call.mutates}
    constant = {
        v.value
        for v in values
        if v.call < 0 and storages[v.storage].role in _CONSTANT_ROLES and v.storage not in written
    }
    same: dict[int, int] = {}
    seen: dict[str, Call] = {}
    for call in calls:
        touched = {values[v].storage for v in call.returns if v >= 0}
        if call.phase != "forward" or call.is_random or call.mutates or touched & written:
            continue
        if any(same.get(v, v) not in constant for v in call.reads):
            continue
        constant.update(v for v in call.returns if v >= 0)
        key = call.target + _renumber(call.arguments, same)
        first = seen.setdefault(key, call)
        if first is not call:
            same.update({b: a for a, b in zip(first.returns, call.returns) if b >= 0})
    return same


def _renumber(text: str, numbers: dict[int, int]) -> str:
    return re.sub(r'\{"value":(\d+)\}', lambda m: f'{{"value":{numbers.get(int(m.group(1)), int(m.group(1)))}}}', text)


def compact(
    lowering: Lowering, outputs: Sequence[int]
) -> tuple[list[Storage], list[Value], list[Call], list[Gradient], list[Constant], tuple[int, ...]]:
    """Drop calls that nothing needs and renumber everything densely; the new numbers of `outputs` come last.

    Calls are kept if what the step returns or a gradient depends on them, or if they draw random numbers or change
    something persistent, as eager would do too.
    """
    calls, values, storages = lowering.calls, lowering.values, lowering.storages
    same = merge_equal_constants_of_step(calls, values, storages) if lowering.captured.merges else {}
    values = _move_views(values, same)
    resolve = {v.value: same.get(v.value, v.value) for v in values}
    asked = {values[resolve[v]].storage for v in outputs}
    unasked = {s.storage for s in storages if s.name.startswith(LEFT) and s.role == "outside"} - asked
    needed = {resolve[v] for v in outputs} | {
        resolve[g.gradient_value] for g in lowering.gradients if g.gradient_value >= 0
    }
    needed_storages = {values[v].storage for v in needed}
    kept: list[Call] = []
    for call in reversed(calls):
        if all(same.get(v, v) != v for v in call.returns if v >= 0) and any(v >= 0 for v in call.returns):
            continue
        persistent = any(storages[s].role != "temporary" and s not in unasked for s in call.mutates)
        changes_needed = any(s in needed_storages for s in call.mutates)
        if persistent or changes_needed or call.is_random or any(v in needed for v in call.returns):
            kept.append(call)
            for v in (resolve[v] for v in call.reads):
                needed.add(v)
                needed_storages.add(values[v].storage)
    kept.reverse()

    used = (
        {v for call in kept for v in call.returns if v >= 0}
        | needed
        | {v.value for v in values if v.call < 0 and v.storage not in unasked}
    )
    value_number = {v: i for i, v in enumerate(sorted(used))}
    storage_number = {s: i for i, s in enumerate(sorted({values[v].storage for v in used}))}
    call_number = {call.call: i for i, call in enumerate(kept)}
    to_new = {v: value_number[resolve[v]] for v in resolve if resolve[v] in value_number}
    new_values = [
        replace(
            values[old],
            value=new,
            storage=storage_number[values[old].storage],
            call=-1 if values[old].call < 0 else call_number[values[old].call],
        )
        for old, new in value_number.items()
    ]
    new_calls = [
        replace(
            call,
            call=call_number[call.call],
            arguments=_renumber(call.arguments, to_new),
            replay_arguments=_renumber(call.replay_arguments, to_new),
            reads=tuple(to_new[v] for v in call.reads),
            returns=tuple(-1 if v < 0 else value_number[v] for v in call.returns),
            mutates=tuple(sorted(storage_number[s] for s in call.mutates)),
        )
        for call in kept
    ]
    gradients = [
        replace(
            g,
            parameter_value=to_new[g.parameter_value],
            gradient_value=-1 if g.gradient_value < 0 else to_new[g.gradient_value],
        )
        for g in lowering.gradients
    ]
    constants = [replace(c, value=to_new[c.value]) for c in lowering.constants if c.value in to_new]
    new_storages = [replace(storages[old], storage=new) for old, new in storage_number.items()]
    return new_storages, new_values, new_calls, gradients, constants, tuple(to_new[v] for v in outputs)


def _move_views(values: list[Value], same: dict[int, int]) -> list[Value]:
    """Turn views on a storage that is dropped in favour of an equal one into views on that one."""
    storage_of_value: dict[int, int] = {}

    def resolve(storage: int) -> int:
        while storage_of_value.get(storage, storage) != storage:
            storage = storage_of_value[storage]
        return storage

    for dropped, kept in sorted(same.items()):
        storage_of_value.setdefault(resolve(values[dropped].storage), resolve(values[kept].storage))
    return [replace(v, storage=resolve(v.storage)) for v in values]
