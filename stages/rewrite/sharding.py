"""Rewrites a step for several ranks that hold one shard of each parameter.

Each parameter becomes its shard. Before its first reader in forward a gather creates the whole weight, which all that
read the parameter read instead. A parameter that modules far apart read (tied weights) is gathered for each of them.
Neighbours of one block whose weights are small are gathered together, in a bucket.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from stowage.stages.ir.collectives import GATHER, ShardForm, collective_signature
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.trace import Call, Storage, Value
from stowage.stages.rewrite.buckets import BUCKET_BYTES, block_of

FAR = 200
"""Readers of one parameter in forward with more calls than this between them are served by gathers of their own."""


@dataclass(frozen=True)
class ShardedTables:
    """The tables of a sharded forward and backward.

    Attributes:
        storages, values, calls: see `TraceTables`.
        forms: how each sharded parameter is cut, by the storage of its shard.
    """

    storages: list[Storage]
    values: list[Value]
    calls: list[Call]
    forms: dict[int, ShardForm]


@dataclass
class _Use:
    """One stretch of the step that reads one parameter's whole weight.

    Attributes:
        storage: the parameter.
        block: the part of the model that reads it.
        first: its first reader in forward; last: the last one so far.
        weight: the storage of the gathered weight, once there is one.
        renamed: value of the parameter -> the same window on the gathered weight.
    """

    storage: int
    block: str
    first: int
    last: int
    weight: int = -1
    renamed: dict[int, int] = field(default_factory=dict)


def shard_parameters(
    storages: Sequence[Storage],
    values: Sequence[Value],
    calls: Sequence[Call],
    ranks: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    outside: Collection[str] = (),
) -> ShardedTables:
    """Rewrite forward and backward.

    Args:
        storages: the storages, parameters whole.
        values: the values; old ones keep their numbers.
        calls: forward and backward, no updates.
        ranks: number of ranks.
        bucket_bytes: weights of one block are gathered together until they have so many bytes.
        outside: names of parameters that are no part of the model: each rank has them whole.

    Raises:
        ParameterError: the step changes a parameter in place, or a parameter has no dense memory of its own.
    """
    sharding = _Sharding(list(storages), list(values), ranks, outside)
    calls = sharding.rehome(calls)
    return sharding.tables(calls, bucket_bytes)


class _Sharding:
    """Rewrites the tables of one step."""

    def __init__(self, storages: list[Storage], values: list[Value], ranks: int, outside: Collection[str]) -> None:
        self.storages = storages
        self.values = values
        self.ranks = ranks
        self.base = _bases(storages, values, outside)
        self.forms = {s: self._form(s, v) for s, v in self.base.items()}
        self.names = {v.name for v in values}
        self.uses: list[_Use] = []
        self.moved: set[int] = set()
        self.whole = {s: self.values[v] for s, v in self.base.items()}
        for storage, value in self.base.items():
            form, old = self.forms[storage], values[value]
            nbytes = storages[storage].nbytes // form.elements * form.shard_elements
            storages[storage] = replace(storages[storage], nbytes=nbytes)
            for v in [v for v in values if v.storage == storage and v.call < 0]:
                values[v.value] = replace(v, shape=form.shape, stride=form.stride, offset=old.offset)

    def _form(self, storage: int, value: int) -> ShardForm:
        name, found = self.storages[storage].name, self.values[value]
        form = ShardForm.of(found.shape, found.stride, self.ranks)
        itemsize = self.storages[storage].nbytes // max(math.prod(found.shape), 1)
        if form is None or itemsize * form.elements != self.storages[storage].nbytes or found.offset:
            raise ParameterError(
                f"Parameter '{name}' cannot be sharded: it shares its memory with others or has gaps in it; make it "
                "contiguous, with memory of its own."
            )
        return form

    def rehome(self, calls: Sequence[Call]) -> list[Call]:
        """Let all readers of a parameter read its gathered weight instead."""
        found: list[Call] = []
        waiting: dict[int, list[_Use]] = defaultdict(list)
        view_of: dict[int, Call] = {}
        storage_of = {v: s for s, v in self.base.items()}
        storage_of |= {v.value: v.storage for v in self.values if v.storage in self.forms and v.call < 0}
        for call in calls:
            changed = self.forms.keys() & set(call.mutates)
            if changed:
                name = self.storages[min(changed)].name
                raise ParameterError(
                    f"Parameter '{name}' is changed in place during the step ({call.location or call.target}), which "
                    "no sharded step can do."
                )
            if call.is_view and any(storage_of.get(v, -1) in self.forms for v in call.reads):
                view_of.update({v: call for v in call.returns if v >= 0})
                storage_of.update({v: self.values[v].storage for v in call.returns if v >= 0})
                continue  # made on the gathered weight, where it is read
            renamed: dict[int, int] = {}
            extra: list[Call] = []
            for read in dict.fromkeys(call.reads):
                storage = storage_of.get(read, -1)
                if storage in self.forms:
                    use = self._use(storage, call, waiting[storage])
                    renamed[read] = self._window(use, read, view_of, extra)
            found += [replace(view, call=call.call) for view in extra]  # wherever they were made before
            found.append(_reading(call, renamed) if renamed else call)
        return found

    def _use(self, storage: int, call: Call, uses: list[_Use]) -> _Use:
        """Return the use that a call belongs to; a new one in forward if the last is far away in another block."""
        block = block_of(call.module)
        new = not uses or (call.phase == "forward" and (uses[-1].block != block or call.call - uses[-1].last > FAR))
        if new:
            uses.append(_Use(storage, block, call.call, call.call))
            self.uses.append(uses[-1])
        if call.phase == "forward":
            uses[-1].last = call.call
            return uses[-1]
        return next((u for u in reversed(uses) if u.block == block), uses[-1])

    def _window(self, use: _Use, value: int, view_of: dict[int, Call], extra: list[Call]) -> int:
        """Return a window on the gathered weight that shows what a value shows of the parameter."""
        if value in use.renamed:
            return use.renamed[value]
        if value not in view_of:  # the parameter itself
            if use.weight < 0:
                use.weight = self._weight(use.storage)
            like = self.whole[use.storage]
            base = self._value(like, use.weight, f"whole_{like.name}")
            for other in self.values:
                if other.storage == use.storage and other.call < 0:
                    use.renamed[other.value] = base
            return base
        call = view_of[value]
        inner = [self._window(use, read, view_of, extra) for read in call.reads]
        made = {v: self._view(v, use.weight) for v in call.returns if v >= 0}
        use.renamed.update(made)
        again = _reading(call, dict(zip(call.reads, inner)))
        extra.append(replace(again, returns=tuple(made.get(v, v) for v in call.returns)))
        return use.renamed[value]

    def _view(self, value: int, weight: int) -> int:
        """Return a view's value on a gathered weight: the same value for the first weight, another for each later."""
        if value not in self.moved:
            self.moved.add(value)
            self.values[value] = replace(self.values[value], storage=weight)
            return value
        return self._value(self.values[value], weight, f"whole_{self.values[value].name}", call=0)

    def _weight(self, storage: int) -> int:
        form, old = self.forms[storage], self.storages[storage]
        nbytes = old.nbytes * form.ranks
        self.storages.append(Storage(len(self.storages), nbytes, "temporary", f"{old.name}.whole"))
        return self.storages[-1].storage

    def _value(self, like: Value, storage: int, name: str, call: int = -1) -> int:
        base, n = name, 1
        while name in self.names:
            n += 1
            name = f"{base}_{n}"
        self.names.add(name)
        number = len(self.values)
        self.values.append(replace(like, value=number, storage=storage, name=name, source="", call=call))
        return number

    def tables(self, calls: Sequence[Call], bucket_bytes: int) -> ShardedTables:
        """Insert the gathers, drop what nothing mentions any more, and number calls anew."""
        buckets = self._buckets(calls, bucket_bytes)
        before: dict[int, list[Call]] = defaultdict(list)
        for bucket in buckets:
            before[bucket[0].first].append(self._gather(bucket, calls))
        ordered: list[Call] = []
        number: dict[int, int] = {}
        opened: set[int] = set()
        for call in calls:
            for gather in before.get(call.call, ()) if call.call not in opened else ():
                ordered.append(replace(gather, call=len(ordered)))
            opened.add(call.call)
            number.setdefault(call.call, len(ordered))
            ordered.append(replace(call, call=len(ordered)))
        return self._compacted(ordered)

    def _buckets(self, calls: Sequence[Call], bucket_bytes: int) -> list[list[_Use]]:
        found: list[list[_Use]] = []
        size = 0
        for use in sorted((u for u in self.uses if u.weight >= 0), key=lambda u: u.first):
            nbytes = self.storages[use.weight].nbytes
            fits = found and found[-1][-1].block == use.block and size < bucket_bytes and size + nbytes <= bucket_bytes
            same = found and self._dtype(found[-1][-1]) == self._dtype(use)
            if fits and same:
                found[-1].append(use)
                size += nbytes
            else:
                found.append([use])
                size = nbytes
        return found

    def _dtype(self, use: _Use) -> str:
        return self.values[self.base[use.storage]].dtype

    def _gather(self, bucket: Sequence[_Use], calls: Sequence[Call]) -> Call:
        shards = [self.base[use.storage] for use in bucket]
        weights = [use.renamed[self.base[use.storage]] for use in bucket]
        reader = next(c for c in calls if c.call == bucket[0].first)
        arguments = json.dumps({"args": [[{"value": v} for v in shards]], "kwargs": {}}, separators=(",", ":"))
        return Call(
            call=-1,
            target=GATHER,
            arguments=arguments,
            reads=tuple(shards),
            returns=tuple(weights),
            returns_many=True,
            mutates=(),
            is_view=False,
            is_random=False,
            replay_arguments="",
            phase=reader.phase,
            module=reader.module,
            location=reader.location,
            signature=collective_signature(GATHER, self.ranks, [self.values[v] for v in shards]),
        )

    def _compacted(self, calls: list[Call]) -> ShardedTables:
        """Give values their makers."""
        made = {v: c.call for c in calls for v in c.returns if v >= 0}
        values = [replace(v, call=made.get(v.value, -1)) for v in self.values]
        return ShardedTables(self.storages, values, calls, self.forms)


def _bases(storages: Iterable[Storage], values: Sequence[Value], outside: Collection[str]) -> dict[int, int]:
    """Return the value of each of the model's parameters, by its storage."""
    found: dict[int, int] = {}
    apart = {f"parameter:{name}" for name in outside}
    parameters = {s.storage for s in storages if s.role == "parameter"}
    for value in values:
        if value.call < 0 and value.storage in parameters and 0 not in value.shape and value.source not in apart:
            found.setdefault(value.storage, value.value)
    return found


def _reading(call: Call, renamed: dict[int, int]) -> Call:
    """Return a call that reads other values."""
    arguments, replay = call.arguments, call.replay_arguments
    for old, new in renamed.items():
        arguments = arguments.replace(f'{{"value":{old}}}', f'{{"value":~{new}}}')
        replay = replay.replace(f'{{"value":{old}}}', f'{{"value":~{new}}}')
    return replace(
        call,
        arguments=arguments.replace('{"value":~', '{"value":'),
        replay_arguments=replay.replace('{"value":~', '{"value":'),
        reads=tuple(renamed.get(v, v) for v in call.reads),
    )
