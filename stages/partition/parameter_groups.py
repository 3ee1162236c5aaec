"""Finds the parameters that are gathered together, and what their part of the step takes: Elixir's profile of a model.

It reads the trace alone, so that a model is profiled without being in memory. A group is a module whose parameters are
read while that module runs and at no other time; all others, tied weights among them, belong to the model itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.parallel import ParameterGroup
from stowage.stages.ir.trace import Call, TraceTables

ROOT = ""
"""Path of the model itself."""


@dataclass(frozen=True)
class Modules:
    """The modules of a model, as far as grouping needs them.

    Attributes:
        candidates: paths of modules that may be groups: none is inside another, and each is run by calling it.
        owners: name of a parameter -> paths of all modules that hold it; tied weights have several.
        segments: path of a module whose activations are checkpointed -> number of its segment.
    """

    candidates: tuple[str, ...]
    owners: Mapping[str, tuple[str, ...]]
    segments: Mapping[str, int]


@dataclass
class _Part:
    """What one group's calls take."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_peak: int = 0
    backward_peak: int = 0
    with_gradients: int = 0
    gradients: int = 0
    saved: int = 0
    first_saved: int = 0
    incoming: int = 0
    crossing: int = 0


def parameter_groups(trace: TraceTables, costs: Mapping[str, Cost], modules: Modules) -> list[ParameterGroup]:
    """Return the groups in the order in which forward first uses them; the model's own comes first.

    Args:
        trace: the whole step; without updates the groups have no optimizer states.
        costs: costs by call signature.
        modules: the model's modules.

    Raises:
        TableError: a call of the trace has no cost.
    """
    groups = _Groups(trace, modules)
    parts = _parts(trace, costs, groups)
    gradients = {g.parameter for g in trace.gradients if g.gradient_value >= 0}
    elements, stored = _parameter_sizes(trace)
    states: dict[str, int] = defaultdict(int)
    for storage in trace.storages:
        if storage.role == "state":
            states[storage.name.split("::", 1)[0]] += storage.nbytes
    rows = []
    for number, path in enumerate(groups.order):
        names = groups.members[path]
        trainable = [n for n in names if n in gradients]
        count = sum(elements[n] for n in names)
        learnt = sum(elements[n] for n in trainable)
        width = round(sum(stored[n] for n in names) / count) if count else 0
        part, segment = parts[path], _segment(path, modules.segments)
        again = part.forward_s if segment >= 0 else 0.0
        rows.append(
            ParameterGroup(
                group=number,
                modules=(path,),
                parameters=tuple(names),
                elements=count,
                trainable=learnt,
                stored_bytes=width,
                compute_bytes=width,
                state_bytes=round(sum(states[n] for n in trainable) / learnt) if learnt else 0,
                forward_s=part.forward_s,
                backward_s=part.backward_s + again,
                saved_bytes=part.crossing if segment >= 0 else part.saved,
                forward_peak_bytes=part.forward_peak,
                backward_peak_bytes=max(part.backward_peak, part.forward_peak if segment >= 0 else 0),
                segment=segment,
                backward_with_gradients_bytes=max(part.with_gradients, part.forward_peak if segment >= 0 else 0),
                first_saved_bytes=part.first_saved,
                incoming_bytes=part.incoming,
            )
        )
    return rows


def _segment(path: str, segments: Mapping[str, int]) -> int:
    """Return the segment of a module or of the nearest module around it; -1 where there is none."""
    while path not in segments:
        if not path:
            return -1
        path = path.rpartition(".")[0]
    return segments[path]


class _Groups:
    """Which group each call and each parameter belongs to.

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
        blocks = sorted((p for p in self.members if p != ROOT), key=lambda p: first.get(p, len(trace.calls)))
        self.order = [ROOT, *blocks]
        self.of_call = self._assign(trace, names_of)

    def _assign(self, trace: TraceTables, names_of: Mapping[int, list[str]]) -> list[str]:
        """Return the group of each call.

        In backward the calls' modules are those that made what they read, which may be another block. What tells more
        is which weights they read and which gradients they complete: groups come in reverse, and as long as one of a
        group's weights is still to be read, it is that group's turn. Views belong to their readers.
        """
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


def _parts(trace: TraceTables, costs: Mapping[str, Cost], groups: _Groups) -> dict[str, _Part]:
    """Replay plain PyTorch's order: what is in memory while each group runs, beside what others have saved."""
    parts: dict[str, _Part] = defaultdict(_Part)
    life = _Lives(trace, groups)
    live = waiting = 0
    begun: set[str] = set()
    saved: dict[str, int] = defaultdict(int)
    saved_by_all = 0
    for call in trace.calls:
        if call.phase == "update":
            continue
        cost = costs.get(call.signature)
        if cost is None:
            raise TableError(f"Call {call.call} ({call.target}) has no cost: profile the trace again.")
        path = groups.of_call[call.call]
        part = parts[path]
        if call.phase == "backward" and path not in begun:
            begun.add(path)
            part.incoming = live - saved_by_all + waiting if path != ROOT else 0
        for storage in life.born[call.call]:
            size = trace.storages[storage].nbytes
            live += size
            if storage in life.saved:
                saved[path] += size
                saved_by_all += size
                part.saved += size
                part.first_saved += size if path == ROOT and len(parts) == 1 else 0
            if storage in life.crossing:
                part.crossing += size
        here = live - (saved_by_all - saved[path]) + cost.workspace_bytes + (waiting if path != ROOT else 0)
        if call.phase == "forward":
            part.forward_s += cost.time_s
            part.forward_peak = max(part.forward_peak, here)
        else:
            part.backward_s += cost.time_s
            part.backward_peak = max(part.backward_peak, here)
            part.gradients += life.gradients.get(call.call, 0)
            part.with_gradients = max(part.with_gradients, here + part.gradients)
        waiting += life.waiting.get(call.call, 0)
        for storage in life.dying[call.call]:
            size = trace.storages[storage].nbytes
            live -= size
            if storage in life.saved:
                saved[life.maker[storage]] -= size
                saved_by_all -= size
    return parts


class _Lives:
    """From when to when each temporary storage is in memory; gradients of parameters are not among them.

    Attributes:
        born: call -> storages that it makes.
        dying: call -> storages that it is the last to use.
        saved: storages that forward keeps for backward.
        crossing: storages of forward that another group reads: what a checkpointed segment keeps.
        maker: storage -> path of the group that made it.
        gradients: call -> bytes of gradients of parameters that it makes.
        waiting: call -> bytes of gradients of the model's own group that it completes; they wait for the end of
            backward, while those of other groups are reduced when their part of backward ends.
    """

    def __init__(self, trace: TraceTables, groups: _Groups) -> None:
        storage_of = [v.storage for v in trace.values]
        gradients = {storage_of[g.gradient_value] for g in trace.gradients if g.gradient_value >= 0}
        temporary = {s.storage for s in trace.storages if s.role == "temporary"} - gradients
        own = {storage_of[g.gradient_value] for g in trace.gradients if g.parameter in groups.members[ROOT]} & gradients
        self.gradients: dict[int, int] = defaultdict(int)
        self.waiting: dict[int, int] = defaultdict(int)
        to_come = set(gradients)
        for call in trace.calls:
            for storage in {storage_of[v] for v in call.returns if v >= 0} & to_come:
                self.gradients[call.call] += trace.storages[storage].nbytes
                self.waiting[call.call] += trace.storages[storage].nbytes if storage in own else 0
                to_come.discard(storage)
        made: dict[int, Call] = {}
        last: dict[int, Call] = {}
        self.crossing: set[int] = set()
        for call in trace.calls:
            if call.phase == "update":
                continue
            used = {storage_of[v] for v in (*call.reads, *(v for v in call.returns if v >= 0))} & temporary
            for storage in used:
                first = made.setdefault(storage, call)
                last[storage] = call
                if call.phase == "forward" and groups.of_call[first.call] != groups.of_call[call.call]:
                    self.crossing.add(storage)
        self.maker = {s: groups.of_call[call.call] for s, call in made.items()}
        self.saved = {s for s, call in made.items() if call.phase == "forward" and last[s].phase == "backward"}
        self.born: dict[int, list[int]] = defaultdict(list)
        self.dying: dict[int, list[int]] = defaultdict(list)
        for storage, call in made.items():
            self.born[call.call].append(storage)
            self.dying[last[storage].call].append(storage)


def _parameter_sizes(trace: TraceTables) -> tuple[dict[str, int], dict[str, int]]:
    """Return the elements and the bytes of each parameter."""
    elements: dict[str, int] = {}
    stored: dict[str, int] = {}
    for value in trace.values:
        role, _, name = value.source.partition(":")
        if role == "parameter":
            count = 1
            for size in value.shape:
                count *= size
            elements[name] = count
            stored[name] = min(trace.storages[value.storage].nbytes, count * _width(value.dtype))
    return elements, stored


def _width(dtype: str) -> int:
    """Return the bytes of one element of a type such as `bfloat16`; types below a byte count as one."""
    digits = "".join(c for c in dtype.split("_")[0] if c.isdigit())
    return max(1, int(digits or 8) // 8)


def merged(groups: Sequence[ParameterGroup]) -> ParameterGroup:
    """Return neighbouring groups as one, numbered as the first; all its parameters are gathered at once."""
    first = groups[0]
    elements, trainable = sum(g.elements for g in groups), sum(g.trainable for g in groups)
    forward_peak = backward_peak = together = before = 0
    for group in groups:
        forward_peak = max(forward_peak, before + group.forward_peak_bytes)
        backward_peak = max(backward_peak, before + group.backward_peak_bytes)
        joint = group.backward_with_gradients_bytes or group.backward_peak_bytes + group.trainable * group.compute_bytes
        later = sum(g.trainable * g.compute_bytes for g in groups if g.group > group.group)
        together = max(together, before + later + joint)
        before += group.saved_bytes

    def mean(width: str, weight: str, total: int) -> int:
        return round(sum(getattr(g, width) * getattr(g, weight) for g in groups) / total) if total else 0

    return ParameterGroup(
        group=first.group,
        modules=tuple(m for g in groups for m in g.modules),
        parameters=tuple(n for g in groups for n in g.parameters),
        elements=elements,
        trainable=trainable,
        stored_bytes=mean("stored_bytes", "elements", elements),
        compute_bytes=mean("compute_bytes", "elements", elements),
        state_bytes=mean("state_bytes", "trainable", trainable),
        forward_s=sum(g.forward_s for g in groups),
        backward_s=sum(g.backward_s for g in groups),
        saved_bytes=before,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        segment=first.segment if all(g.segment == first.segment for g in groups) else -1,
        backward_with_gradients_bytes=together,
        first_saved_bytes=sum(g.first_saved_bytes for g in groups),
        incoming_bytes=groups[-1].incoming_bytes,
    )
