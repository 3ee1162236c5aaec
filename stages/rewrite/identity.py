"""Finds the calls and storages of one rewrite of a trace in another rewrite of the same trace.

Rewrites number calls, values and storages anew, but keep the names of values: every name stands for one value in any
rewrite that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from stowage.stages.ir.trace import Call, TraceTables, base_values

CallKey = tuple[object, ...]


class Names:
    """Names the calls and storages of a trace by what they are, not by their numbers."""

    def __init__(self, trace: TraceTables) -> None:
        first = base_values(trace)
        self._value = [v.name for v in trace.values]
        self.storage = [self._value[first[s.storage]] if s.storage in first else s.name for s in trace.storages]
        self.call: list[CallKey] = []
        seen: Counter[CallKey] = Counter()
        for call in trace.calls:
            key = self._key(call)
            self.call.append((*key, seen[key]))
            seen[key] += 1

    def _key(self, call: Call) -> CallKey:
        returned = tuple(self._value[v] for v in call.returns if v >= 0)
        if returned:
            return call.target, returned
        return call.target, tuple(self._value[v] for v in call.reads), tuple(self.storage[s] for s in call.mutates)


class Translation:
    """Translates numbers of calls and storages of one trace to those of another."""

    def __init__(self, source: Names, target: Names) -> None:
        calls: Mapping[CallKey, int] = {key: number for number, key in enumerate(target.call)}
        storages = {name: number for number, name in enumerate(target.storage)}
        self._calls = [calls.get(key, -1) for key in source.call]
        self._storages = [storages.get(name, -1) for name in source.storage]

    def calls(self, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the same calls, ascending; None where the other trace lacks one."""
        found = sorted(self._calls[n] for n in numbers)
        return None if found and found[0] < 0 else tuple(found)

    def storages(self, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the same storages, in the same order; None where the other trace lacks one."""
        found = tuple(self._storages[n] for n in numbers)
        return None if -1 in found else found
