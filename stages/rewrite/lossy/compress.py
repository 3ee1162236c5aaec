"""Packs values behind their last use in forward, and lets backward read what is unpacked before its first use there.

    x = …                      forward, as before
    y = f(x)                   the last forward call that reads x
    codes = pack(x)            x is freed here
    …
    x~ = unpack(codes)         backward
    y~ = f(x~)                 only where f is cheap and backward reads y: then y is not saved either
    dw = g(x~, y~, dy)

Forward reads x itself, so the loss stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stowage.stages.ir.trace import AGAIN, Call, TraceTables
from stowage.stages.rewrite.lossy.codecs import Codec, Codes
from stowage.stages.rewrite.lossy.emitter import Emitter, Form, Lines, Place, reading
from stowage.stages.rewrite.lossy.saved import Part, Saved, saved_values, written_as

FARTHEST = 24
"""Readers with more calls than this between them each get a value of their own, unpacked from the same codes."""


def compressed_sites(trace: TraceTables, codec: Codec) -> list[Saved]:
    """Return the values that a codec can pack, in the order of their makers."""
    return [saved for saved in saved_values(trace, alone=codec.alone) if codec.fits(trace, saved)]


def compress(codec: Codec, trace: TraceTables, where: Callable[[Call], bool] = lambda call: True) -> TraceTables:
    """Return the trace with values packed by a codec; the trace itself where there are none.

    Args:
        codec: packs and unpacks.
        trace: the trace.
        where: says whether to pack what a call makes; by default everything is packed that the codec can pack.
    """
    found = [saved for saved in compressed_sites(trace, codec) if where(trace.calls[saved.maker])]
    return compress_values(codec, trace, found)


def compress_values(codec: Codec, trace: TraceTables, values: Sequence[Saved]) -> TraceTables:
    """Return the trace with some of its `saved_values` packed by a codec; the trace itself where there are none."""
    emitter = Emitter(trace)
    for saved in values:
        _pack(emitter, codec, saved)
    return emitter.finished(f"{codec.name} codes") if values else trace


def _pack(emitter: Emitter, codec: Codec, saved: Saved) -> None:
    lines: list[tuple[Part, Codes, Place]] = []
    for part in saved.parts:
        maker, base = emitter.trace.calls[part.maker], emitter.trace.values[part.base]
        place = Place("forward", maker.module, maker.location, f"{base.name}_{codec.name}")
        packing = Lines(emitter, place)
        lines.append((part, codec.pack(packing, part.base), replace(place, phase="backward")))
        emitter.behind[part.last] += packing.calls
    moved: set[int] = set()
    for readers in _groups(saved.readers):
        unpacked: dict[int, int] = {}
        calls: list[Call] = []
        for part, codes, place in lines:
            unpacking = Lines(emitter, place)
            unpacked[part.base] = codec.unpack(unpacking, codes, emitter.trace.values[part.base])
            calls += unpacking.calls
        _Backward(emitter, saved, unpacked, codec.name, moved).reroute(readers, calls)


def _groups(readers: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for reader in readers:
        if found and reader - found[-1][-1] <= FARTHEST:
            found[-1].append(reader)
        else:
            found.append([reader])
    return found


class _Backward:
    """Lets calls of backward read what is unpacked, its views, and what is made again of it.

    Views that backward makes are moved: they become views of the new tensor. Views that forward made, and views that
    were moved already, are made again.
    """

    def __init__(
        self, emitter: Emitter, saved: Saved, unpacked: Mapping[int, int], suffix: str, moved: set[int]
    ) -> None:
        self._emitter, self._trace = emitter, emitter.trace
        self._suffix = suffix
        self._again = {c: emitter.trace.calls[c] for c in saved.again}
        made = {emitter.trace.values[v].storage for c in self._again.values() for v in c.returns if v >= 0}
        self._base = {part.storage: part.base for part in saved.parts}
        self._old = {*self._base, *made}
        self._renamed = dict(unpacked)
        self._moved = moved

    def reroute(self, readers: Sequence[int], unpacking: Sequence[Call]) -> None:
        """Change some calls of backward, and put the calls that unpack before the first of them."""
        emitter = self._emitter
        events = sorted({*readers, *self._own_views(readers)})
        for event in events:
            call = emitter.changed.get(event, self._trace.calls[event])
            for value in call.reads:
                self._of(value, event)
            emitter.changed[event] = reading(call, self._renamed)
            if event not in readers:
                self._move(self._trace.calls[event])
        emitter.before[events[0]] = [*unpacking, *emitter.before[events[0]]]

    def _own_views(self, readers: Sequence[int]) -> set[int]:
        """Return the views that backward makes for these readers, and that are not moved yet."""
        found: set[int] = set()
        waiting = [v for reader in readers for v in self._trace.calls[reader].reads]
        while waiting:
            row = self._trace.values[waiting.pop()]
            call = self._trace.calls[row.call] if row.call >= 0 else None
            if call is None or row.storage not in self._old or not call.is_view or call.call in found:
                continue
            waiting += call.reads
            if call.phase == "backward" and call.call not in self._moved:
                found.add(call.call)
        return found

    def _move(self, view: Call) -> None:
        self._moved.add(view.call)
        storage = self._emitter.values[self._renamed[view.reads[0]]].storage
        for returned in view.returns:
            self._emitter.values[returned] = replace(self._emitter.values[returned], storage=storage)
            self._renamed[returned] = returned

    def _of(self, value: int, event: int) -> int:
        """Return what stands for a value; calls that make it are put before the call of an event."""
        if value in self._renamed:
            return self._renamed[value]
        if value >= len(self._trace.values) or self._trace.values[value].storage not in self._old:
            return value
        call = self._trace.calls[self._trace.values[value].call]
        if not call.is_view and call.call not in self._again:
            written = written_as(self._trace, value)
            if written is None:  # what makes the storage
                self._renamed[value] = self._renamed[self._base[self._trace.values[value].storage]]
            else:  # a call that writes in place returns what it wrote, be it a view
                self._renamed[value] = self._of(written, event)
            return self._renamed[value]
        for read in call.reads:
            self._of(read, event)
        self._copy(call, event)
        return self._renamed[value]

    def _copy(self, call: Call, event: int) -> None:
        """Make a call of forward again, be it a view, and rename what it returns."""
        emitter, copies = self._emitter, {}
        for returned in call.returns:
            if returned < 0:
                continue
            row = self._trace.values[returned]
            name = f"{row.name}_{self._suffix}"
            if call.is_view:
                storage = emitter.values[self._renamed[call.reads[0]]].storage
            else:
                storage = emitter.storage(self._trace.storages[row.storage].nbytes, f"{name}{AGAIN}")
            copies[returned] = emitter.value(name, Form.like(row), storage, row.offset)
        again = reading(call, self._renamed, tuple(copies.get(v, v) for v in call.returns))
        emitter.before[event].append(replace(again, phase="backward", is_random=False))
        self._renamed |= copies
