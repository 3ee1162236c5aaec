"""Finds the values that forward saves for backward, and that codes of fewer bits may replace."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from stowage.stages.ir.collectives import COLLECTIVES
from stowage.stages.ir.operators import SEALS, SPENDS, without_overload
from stowage.stages.ir.trace import Call, TraceTables, Value, base_values
from stowage.stages.ir.updates import left_behind
from stowage.stages.rewrite.lossy.again import ATTENTION, CHEAP, draws

SMALLEST = 1024
"""Values with fewer elements are left as they are."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The types of values that are packed, with the bytes of an element."""

_SEALED = frozenset(SEALS.values())


@dataclass(frozen=True)
class Part:
    """A storage that is packed, once for all views of it.

    Attributes:
        storage: the storage.
        base: the value that covers all of it.
        maker: the call that creates it.
        last: the last forward call that touches it.
    """

    storage: int
    base: int
    maker: int
    last: int


@dataclass(frozen=True)
class Saved(Part):
    """A value that forward makes and backward reads.

    Attributes:
        readers: the backward calls that read it, or what is made again of it, views left out.
        again: the forward calls that are made again in backward, of what is unpacked.
        freed: the storages that backward read before, and that nothing keeps for it when this one is packed.
        beside: the storages that forward makes, and that `again` reads besides: backward must find them.
        also: what is packed with it, or not at all: k and v of attention with q.
    """

    readers: tuple[int, ...]
    again: tuple[int, ...] = ()
    freed: frozenset[int] = frozenset()
    beside: frozenset[int] = frozenset()
    also: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return everything that is packed."""
        return (self, *self.also)

    def excludes(self, other: Saved) -> bool:
        """Say whether one of two values packs what the other spares too, or needs as it is."""
        own, others = ({*s.freed, *(part.storage for part in s.parts)} for s in (self, other))
        return not (own.isdisjoint(others) and own.isdisjoint(other.beside) and others.isdisjoint(self.beside))


def saved_values(trace: TraceTables, *, alone: bool = False) -> list[Saved]:
    """Return the values that may be packed, in the order of their makers; one for each call at most.

    Where what is computed of a value by cheap operators is saved too, it is computed again, of what is unpacked,
    instead. No two values spare the same storage, nor does one spare what another is computed of: of those that would,
    the one is taken that spares most.

    Args:
        trace: the trace of a step.
        alone: nothing is computed again.
    """
    search = _Search(trace)
    if alone:
        return search.found(through=False)
    nbytes = [s.nbytes for s in trace.storages]

    def gain(saved: Saved) -> int:
        return sum(nbytes[s] for s in saved.freed) - sum(nbytes[part.storage] for part in saved.parts)

    found = [*search.found(through=True), *search.attentions()]
    candidates = [*search.found(through=False), *(s for s in found if gain(s) > 0)]
    kept: list[Saved] = []
    # Of as much with the fewest calls.
    for saved in sorted(candidates, key=lambda s: (-gain(s), len(s.again), s.maker)):
        if not any(saved.excludes(other) for other in kept):
            kept.append(saved)
    return sorted(kept, key=lambda saved: saved.maker)


class _Search:
    """Looks at one trace."""

    def __init__(self, trace: TraceTables) -> None:
        self._trace = trace
        self._storage_of = [v.storage for v in trace.values]
        self._touched: dict[int, list[Call]] = defaultdict(list)
        self._maker: dict[int, Call] = {}
        for call in trace.calls:
            if call.is_view:
                continue
            for storage in {self._storage_of[v] for v in call.reads} | set(call.mutates):
                self._touched[storage].append(call)
            for storage in {self._storage_of[v] for v in call.returns if v >= 0}:
                self._maker.setdefault(storage, call)
        self._roles = [s.role for s in trace.storages]

    @cached_property
    def _trained(self) -> set[int]:
        """Return the storages that depend on a parameter: what does not may be shared by all blocks."""
        found = {s.storage for s in self._trace.storages if s.role == "parameter"}
        for call in self._trace.calls:
            if call.is_random or any(self._storage_of[v] in found for v in call.reads):
                found.update(self._storage_of[v] for v in call.returns if v >= 0)
                found.update(call.mutates)
        return found

    @cached_property
    def _staying(self) -> set[int]:
        """Return the storages that are there at the end of the step."""
        meta = self._trace.meta
        values = (*left_behind(self._trace), *meta.left, *meta.outputs, max(meta.loss_value, 0))
        return {self._storage_of[v] for v in values}

    def found(self, *, through: bool) -> list[Saved]:
        """Return what is asked for."""
        found: dict[int, Saved] = {}
        for storage in self._trace.storages:
            part = self._part(storage.storage)
            if part is None or part.maker in found:
                continue
            again = self._again([part]) if through else []
            saved = self._saved([part], again)
            if saved is not None and bool(again) == through:
                found[part.maker] = saved
        return [found[call] for call in sorted(found)]

    def attentions(self) -> list[Saved]:
        """Return q, k and v of fused attention where they are several storages: packed together, or not at all."""
        found: list[Saved] = []
        for call in self._trace.calls:
            if call.phase != "forward" or not call.target.startswith(ATTENTION):
                continue
            parts = [self._part(s) for s in dict.fromkeys(self._storage_of[v] for v in call.reads[:3])]
            whole = [part for part in parts if part is not None]
            if len(whole) < 2 or len(whole) < len(parts):
                continue
            again = self._again(whole)
            saved = self._saved(whole, again) if call in again else None
            if saved is not None:
                found.append(saved)
        return found

    @cached_property
    def _bases(self) -> Mapping[int, int]:
        return base_values(self._trace)

    def _part(self, own: int) -> Part | None:
        """Return what packing a storage needs to know; None where it cannot be packed."""
        trace, maker = self._trace, self._maker.get(own)
        if self._roles[own] != "temporary" or maker is None or own not in self._trained or own in self._staying:
            return None
        nbytes = trace.storages[own].nbytes
        largest = max(trace.storages[self._storage_of[v]].nbytes for v in maker.returns if v >= 0)
        if maker.phase != "forward" or not maker.reads or nbytes < largest or maker.target in COLLECTIVES:
            return None
        base = trace.values[self._bases[own]]
        if not is_whole(base, nbytes):
            return None
        forward = [c.call for c in self._touched[own] if c.phase == "forward"]
        returned = [v for c in forward if c != maker.call for v in trace.calls[c].returns]
        if any(v >= 0 and self._storage_of[v] == own and written_as(trace, v) is None for v in returned):
            return None
        return Part(own, base.value, maker.call, max([maker.call, *forward]))

    def _saved(self, parts: Sequence[Part], again: Sequence[Call]) -> Saved | None:
        own = [part.storage for part in parts]
        made = {self._storage_of[v] for c in again for v in c.returns if v >= 0}
        readers: dict[int, None] = {}
        for storage in (*own, *made):
            for call in self._later(storage):
                if storage in call.mutates or not self._may_read(call, made):
                    return None
                readers[call.call] = None
        if not readers:
            return None
        freed = frozenset(s for s in (*own, *made) if self._later(s))
        read = {self._storage_of[v] for c in again for v in c.reads} - {*own, *made}
        return Saved(
            **asdict(parts[0]),
            readers=tuple(sorted(readers)),
            again=tuple(c.call for c in again),
            freed=freed,
            beside=frozenset(s for s in read if self._roles[s] == "temporary"),
            also=tuple(parts[1:]),
        )

    def _later(self, storage: int) -> list[Call]:
        return [c for c in self._touched[storage] if c.phase != "forward"]

    def _may_read(self, call: Call, made: set[int]) -> bool:
        """Say whether a later call may find another content: not what only its own forward knows."""
        if call.phase != "backward" or call.target in SPENDS:
            return False
        if call.target.startswith(ATTENTION):
            # Its log-sum-exp must belong to the very q, k and v that it reads.
            return all(self._storage_of[v] in made for v in call.reads[4:6])
        return without_overload(call.target) not in _SEALED

    def _again(self, parts: Sequence[Part]) -> list[Call]:
        """Return the cheap calls by which values that backward reads are computed of some storages and nothing else.

        They may also read parameters and constants, and what backward reads anyway.
        """
        own = frozenset(part.storage for part in parts)
        makers, within = {part.maker for part in parts}, set(own)
        found: list[Call] = []
        waiting = [c.call for storage in own for c in self._touched[storage] if c.phase == "forward"]
        heapq.heapify(waiting)
        seen: set[int] = set()
        while waiting:
            call = self._trace.calls[heapq.heappop(waiting)]
            if call.call in seen or call.call in makers:
                continue
            seen.add(call.call)
            reads = {self._storage_of[v] for v in call.reads}
            there = all(s in within or self._is_there(s) for s in reads)
            if there and self._is_cheap(call, own) and not any(self._changes_after(s, call) for s in reads):
                made = {self._storage_of[v] for v in call.returns if v >= 0}
                if not made.intersection(self._staying) and all(self._written_once(s, call) for s in made):
                    within |= made
                    found.append(call)
                    for storage in made:
                        for reader in self._touched[storage]:
                            if reader.phase == "forward":
                                heapq.heappush(waiting, reader.call)
        return self._needed(found)

    def _is_cheap(self, call: Call, own: frozenset[int]) -> bool:
        if call.mutates or call.replay_arguments:
            return False
        if call.target.startswith(ATTENTION):  # of q, k and v that are all packed together
            return not draws(call) and {self._storage_of[v] for v in call.reads[:3]} == own
        return call.target in CHEAP and not call.is_random

    def _is_there(self, storage: int) -> bool:
        """Say whether a storage is in memory in backward anyway, with the content that forward finds."""
        if self._roles[storage] == "temporary":
            return any(c.phase == "backward" for c in self._touched[storage])
        return all(storage not in c.mutates for c in self._touched[storage] if c.phase == "forward")

    def _changes_after(self, storage: int, call: Call) -> bool:
        """Say whether something is written into a storage after a call of forward, which would then read that."""
        if self._roles[storage] != "temporary":  # parameters are updated behind everything that reads them
            return False
        return any(storage in c.mutates and c.call > call.call for c in self._touched[storage])

    def _written_once(self, storage: int, call: Call) -> bool:
        return self._maker[storage] is call and all(storage not in c.mutates for c in self._touched[storage])

    def _needed(self, calls: Sequence[Call]) -> list[Call]:
        """Return those of the calls, in order, whose results backward reads, or that make what these need."""
        wanted: set[int] = set()
        found: list[Call] = []
        for call in reversed(calls):
            made = {self._storage_of[v] for v in call.returns if v >= 0}
            if wanted.intersection(made) or any(self._later(s) for s in made):
                wanted |= {self._storage_of[v] for v in call.reads}
                found.append(call)
        return found[::-1]


def written_as(trace: TraceTables, value: int) -> int | None:
    """Return the argument that a call which writes in place has written, and returns as a value.

    None where a value is no argument of its call: what makes it has written nothing.
    """
    row = trace.values[value]
    for read in trace.calls[row.call].reads if row.call >= 0 else ():
        other = trace.values[read]
        same = (other.storage, other.offset, other.shape, other.stride, other.dtype)
        if same == (row.storage, row.offset, row.shape, row.stride, row.dtype):
            return read
    return None


def is_whole(base: Value, nbytes: int) -> bool:
    """Say whether a value of a type that is packed covers its storage without gaps."""
    elements = math.prod(base.shape)
    if base.dtype not in ITEM_BYTES or elements < SMALLEST or base.offset:
        return False
    if elements * ITEM_BYTES[base.dtype] != nbytes:
        return False
    reached = 1
    for size, stride in sorted(zip(base.shape, base.stride), key=lambda pair: (pair[1], pair[0])):
        if size > 1 and stride != reached:
            return False
        reached *= size if size > 1 else 1
    return True


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))
