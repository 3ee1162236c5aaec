"""Finds what backward need not do under a mask.

Kernels have flags for their results and arguments for some of these alone, and whole values are copied over codes for
what trains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stowage.stages.ir.flags import FLAGGED, asked_for
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.units import ALWAYS, Unit, bits_of, implies, joined
from stowage.stages.ir.whole_copies import whole_copies

SHAPED = {"aten.convolution_backward.default": (1, 1)}
"""Kernels that read the contents of an argument for one result alone: the positions of both.

Of the input of a convolution the gradient of its input takes the form, and the gradient of its weight the contents.
"""


@dataclass(frozen=True)
class Omissible:
    """A result that is computed only if something of a guard trains.

    Attributes:
        output: its position among the results.
        storage: the storage that it is in.
        guard: the units for which it is read.
    """

    output: int
    storage: int
    guard: int


def optional_results(trace: TraceTables, call: Call, later: Mapping[int, int], guard: int) -> Iterator[Omissible]:
    """Yield the results of a call that are left out under some masks under which it runs.

    Args:
        trace: the trace of the step.
        call: the call.
        later: the guard of what reads each storage that it makes.
        guard: the guard of the row that makes the call.
    """
    if call.target not in FLAGGED:
        return
    for output in asked_for(call.arguments):
        value = call.returns[output]
        storage = trace.values[value].storage if value >= 0 else -1
        if storage in later and later[storage] != guard:
            yield Omissible(output, storage, later[storage])


def without_unread(
    trace: TraceTables, node: ComputeNode, later: Mapping[int, int], guard: int, mask: int
) -> ComputeNode:
    """Return a node without the results that are left out under a mask."""
    out = {o.storage for o in omissible(trace, node, later, guard) if not o.guard & mask}
    return replace(node, creates=tuple(s for s in node.creates if s not in out)) if out else node


def omissible(trace: TraceTables, node: ComputeNode, later: Mapping[int, int], guard: int) -> list[Omissible]:
    """Return the results of a node that are left out under some masks; see `optional_results`."""
    return [o for c in node.calls for o in optional_results(trace, trace.calls[c], later, guard)]


@dataclass(frozen=True)
class Copied:
    """A whole value that is copied over what was unpacked of it only if something of a guard trains.

    Attributes:
        source: the storage of the whole value.
        guard: the units for which it is copied.
    """

    source: int
    guard: int


def copied_guards(trace: TraceTables, units: Sequence[Unit]) -> Mapping[int, Copied]:
    """Return what `whole_copies` finds, by call, with its guard."""
    of = bits_of(units)
    return {
        call: Copied(copy.source, joined(*(of.get(name, ALWAYS) for name in copy.parameters)) or ALWAYS)
        for call, copy in whole_copies(trace).items()
    }


@dataclass(frozen=True)
class StandIn:
    """An argument of which a row reads the contents only if something of a guard trains, and else the form alone.

    Attributes:
        value: the argument.
        storage: the storage that it covers.
        guard: the units for which its contents are read.
    """

    value: int
    storage: int
    guard: int


def stand_ins(trace: TraceTables, node: ComputeNode, later: Mapping[int, int], guard: int) -> Iterator[StandIn]:
    """Yield the arguments of a row that may be anything of their form under some masks under which it runs.

    Args:
        trace: the trace of the step.
        node: what the row computes.
        later: the guard of what reads each storage that it makes.
        guard: the guard of the row.
    """
    read = [trace.values[v].storage for c in node.calls for v in trace.calls[c].reads]
    for call in (trace.calls[c] for c in node.calls):
        if call.target not in SHAPED:
            continue
        position, output = SHAPED[call.target]
        value = trace.values[json.loads(call.arguments)["args"][position]["value"]]
        own = later.get(trace.values[call.returns[output]].storage, ALWAYS) if call.returns[output] >= 0 else ALWAYS
        whole = value.call >= 0 and not trace.calls[value.call].is_view and value.offset == 0
        alone = trace.storages[value.storage].role == "temporary" and read.count(value.storage) == 1
        if whole and alone and own and not implies(guard, own):
            yield StandIn(value.value, value.storage, own)
