"""Decides which group of parameters each call and each parameter of a trace belongs to.

A group is a module whose parameters are read while that module runs and at no other time; all others, tied weights
among them, belong to the model itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stowage.stages.ir.trace import TraceTables

ROOT = ""
"""Path of the model itself."""


@dataclass(frozen=True)
class Modules:
    """The modules of a model, as far as grouping needs them.

    Attributes:
        candidates: paths of modules that may be groups: none is inside another, and each is run by calling it.
        owners: name of a parameter -> paths of all modules that hold it; tied weights have several.
        segments: path of a module whose activations are checkpointed -> number of its segment.
        collected: modules and names of parameters they hold, in the order in which FSDP2 collects them.
        taking: paths of modules that read, beside their parameters, what needs a gradient.
        returning: paths of modules that return what needs a gradient.
        paths: paths of all modules, in the order of `named_modules()`.
    """

    candidates: tuple[str, ...]
    owners: Mapping[str, tuple[str, ...]]
    segments: Mapping[str, int]
    collected: tuple[tuple[str, str], ...]
    taking: frozenset[str]
    returning: frozenset[str]
    paths: tuple[str, ...]


class Groups:
    """Tells which group each call and each parameter belongs to.

    Attributes:
        order: paths of the groups, in the order of first use.
        of_call: the group of each call.
        members: names of each group's parameters, in the order of first use.
    """

    def __init__(self, trace: TraceTables, modules: Modules) -> None:
        self._candidates = frozenset(modules.candidates)
        self._found: dict[str, str] = {}
        readers: dict[str, set[str]] = defaultdict(set)
        names_of: dict[int, list[str]] = defaultdict(list)
        for value in trace.values:
            role, _, name = value.source.partition(":")
            if role == "parameter":
                names_of[value.storage].append(name)
        used: list[str] = []
        for call in trace.calls:
            if call.phase != "forward":
                continue
            for storage in dict.fromkeys(trace.values[v].storage for v in call.reads):
                for name in names_of.get(storage, ()):
                    if not readers[name]:
                        used.append(name)
                    readers[name].add(call.module)
        everything = [n for names in names_of.values() for n in names]
        order = used + [n for n in everything if not readers[n]]
        self._without_foreign_readers(order, readers, modules.owners)
        first: dict[str, int] = {}
        for call in trace.calls:
            if call.phase == "forward":
                first.setdefault(self.of(call.module), call.call)
        self.members: dict[str, list[str]] = {ROOT: []}
        for name in order:
            self.members.setdefault(self._home(name, readers, modules.owners), []).append(name)
        self._candidates &= self.members.keys()  # a module under two names has no parameter of its own
        self._found.clear()
        blocks = sorted((p for p in self.members if p != ROOT), key=lambda p: first.get(p, len(trace.calls)))
        self.order = [ROOT, *blocks]
        self.of_call = self._assign(trace, names_of)

    def _assign(self, trace: TraceTables, names_of: Mapping[int, list[str]]) -> list[str]:
        """Return the group of each call.

        In backward it is that of the forward call whose backward function they belong to. Of others the modules are
        those that made what they read, which may be another block. What tells more is which weights they read and which
        gradients they complete: groups come in reverse, and as long as one of a group's weights is still to be read, it
        is that group's turn. Views belong to their readers.
        """
        made_by = {c.function: self.of(c.module) for c in trace.calls if c.phase == "forward" and c.function >= 0}
        found = [self.of(call.module) for call in trace.calls]
        place = {path: i for i, path in enumerate(self.order)}
        home = {name: path for path, names in self.members.items() for name in names if path != ROOT}
        completes = {g.gradient_value: home[g.parameter] for g in trace.gradients if g.parameter in home}
        turn = 0
        reader: dict[int, str] = {}
        for call in reversed(trace.calls):
            if call.is_view:
                found[call.call] = next((reader[v] for v in call.returns if v in reader), found[call.call])
            if call.phase == "backward":
                read = {n for v in call.reads for n in names_of.get(trace.values[v].storage, ()) if n in home}
                touched = {home[n] for n in read} | {completes[v] for v in call.returns if v in completes}
                turn = max([turn, *(place[path] for path in touched)])
                if turn and not (turn == len(self.order) - 1 and found[call.call] == ROOT and not touched):
                    found[call.call] = self.order[turn]
                found[call.call] = made_by.get(call.function, found[call.call])
            reader.update(dict.fromkeys(call.reads, found[call.call]))
        return found

    def of(self, path: str) -> str:
        """Return the group that the calls of a module belong to."""
        if path not in self._found:
            here = path
            while here and here not in self._candidates:
                here = here.rpartition(".")[0]
            self._found[path] = here
        return self._found[path]

    def _home(self, name: str, readers: Mapping[str, set[str]], owners: Mapping[str, tuple[str, ...]]) -> str:
        homes = {self.of(p) for p in (*readers[name], *owners[name])}
        return homes.pop() if len(homes) == 1 else ROOT

    def _without_foreign_readers(
        self, names: Iterable[str], readers: Mapping[str, set[str]], owners: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Drop candidates that hold a parameter which is read elsewhere and which no module outside of them holds.

        `fully_shard` of the model itself would not find such a parameter.
        """
        for name in names:
            held = {self.of(p) for p in owners[name]}
            if ROOT not in held and self._home(name, readers, owners) == ROOT:
                self._candidates -= held
                self._found.clear()
