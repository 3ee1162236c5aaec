"""Lowers an fx graph to tables: values, storages, calls, and which of them alias or mutate which."""

from __future__ import annotations

import operator
import os
import re
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from stowage.stages.ir.errors import TraceError
from stowage.stages.ir.operators import OPAQUE
from stowage.stages.ir.results import flat_results, grouped, groups_of
from stowage.stages.ir.source import can_be_value
from stowage.stages.ir.trace import Call, Constant, Gradient, Phase, Storage, StorageRole, Value
from stowage.stages.trace.calls.encoding import encode
from stowage.stages.trace.calls.operators import (
    ALIASES,
    fresh_factory,
    is_random,
    mutated_arguments,
    replay_arguments,
    true_outputs,
    writes,
    written_keywords,
)
from stowage.stages.trace.calls.scalars import without_numbers
from stowage.stages.trace.calls.signature import call_signature
from stowage.stages.trace.capture import Captured
from stowage.stages.trace.recording.record import FUNCTION, LOCATION, PATH, PHASE, SOURCE

_PREFIXES = {"parameter": "p_", "buffer": "b_", "input": "x_", "constant": "c", "outside": "o_"}


class Lowering:
    """Builds the tables in one walk over the graph; `compact` drops what nothing needs."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.constants: list[Constant] = []
        self.gradients: list[Gradient] = []
        self.outputs: list[int] = []
        self._value_of: dict[fx.Node, Any] = {}
        self._storage_of: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        self._names: set[str] = set()
        self._module_of_storage: dict[int, str] = {}
        self._functions = _backward_functions(captured.graph)
        self._parameters: dict[str, int] = {}

    def run(self) -> None:
        """Walk the graph."""
        for node in self.captured.graph.nodes:
            if SOURCE in node.meta:
                self._value_of[node] = self._source(node)
            elif node.op == "call_function":
                self._lower(node)
            elif node.op == "output":
                self._outputs(node)
        if any(tensor.device.type != "cpu" for tensor in self._tensors):
            places = zip(self.values, self._tensors, strict=True)
            self.values = [replace(v, on_host=True) if t.device.type == "cpu" else v for v, t in places]

    def _identifier(self, text: str) -> str:
        base = re.sub(r"\W", "_", text, flags=re.ASCII)
        if not can_be_value(base):
            base = f"v_{base}"
        name, n = base, 1
        while name in self._names:
            n += 1
            name = f"{base}_{n}"
        self._names.add(name)
        return name

    def _value(self, tensor: torch.Tensor, storage: int, call: int, output: int, name: str, source: str = "") -> int:
        value = Value(
            value=len(self.values),
            storage=storage,
            call=call,
            output=output,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(int(n) for n in tensor.shape),
            stride=tuple(int(n) for n in tensor.stride()),
            offset=int(tensor.storage_offset()),
            name=self._identifier(name),
            source=source,
        )
        self.values.append(value)
        self._tensors.append(tensor)  # keeps storages alive, so that their identities stay unique
        return value.value

    def _new_storage(self, tensor: torch.Tensor, role: StorageRole, name: str) -> int:
        storage = Storage(len(self.storages), int(tensor.untyped_storage().nbytes()), role, name)
        self.storages.append(storage)
        self._storage_of[tensor.untyped_storage()._cdata] = storage.storage
        return storage.storage

    def _persistent(self, tensor: torch.Tensor, role: StorageRole, name: str, identifier: str) -> int:
        known = self._storage_of.get(tensor.untyped_storage()._cdata)
        storage = known if known is not None else self._new_storage(tensor, role, name)
        return self._value(tensor, storage, -1, 0, identifier, f"{role}:{name}")

    def _source(self, node: fx.Node) -> int:
        role, name = node.meta[SOURCE]
        value = self._persistent(node.meta["val"], role, name, f"{_PREFIXES[role]}{name}")
        if role == "constant":
            tensor = self.captured.literals[name]
            content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
            self.constants.append(Constant(value, bytes(content.numpy()) if tensor.numel() else b""))
        if role == "parameter":
            self._parameters[name] = value
        return value

    def _lower(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            self._value_of[node] = self._value_of[source][index]  # type: ignore[index]
            return
        target = node.target
        if not isinstance(target, OpOverload):
            raise TraceError(f"The step calls {target}, which is not a registered operator: use torch.library.")
        if target in ALIASES:
            self._value_of[node] = self._value_of[node.args[0]]  # type: ignore[index]
            return
        args, kwargs = list(node.args), dict(node.kwargs)
        if not target._schema.returns and not writes(target):
            self._check(node, target)
            return
        result = node.meta["val"] if target._schema.returns else []
        factory = fresh_factory(target, result) if isinstance(result, torch.Tensor) else None
        if factory is not None:
            target, args, kwargs = factory
        self._call(node, target, args, kwargs, result)

    def _check(self, node: fx.Node, target: OpOverload) -> None:
        """Leave out a call that returns and writes nothing: it is a check (`_assert_async`) or a message.

        The user gets a notice, unless PyTorch itself makes such calls.
        """
        if target.namespace not in ("aten", "prims"):
            where = _location(node.meta.get(LOCATION, "")) or f"module '{node.meta.get(PATH, '')}'"
            self.captured.notices.append(
                f"The operator {target} ({where}) returns nothing and changes nothing that its schema names, so a "
                "planned step leaves it out."
            )

    def _call(self, node: fx.Node, target: OpOverload, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        reads: list[int] = []
        encoded = self._encode(args, kwargs, reads)
        written = [args[i] for i in mutated_arguments(target, args) if i < len(args)]
        written += [kwargs[name] for name in written_keywords(target) if name in kwargs]
        flat = [item for w in written for item in (w if isinstance(w, (list, tuple)) else [w]) if item is not None]
        mutated = {self.values[self._value_of[w]].storage for w in flat}
        if str(target) in OPAQUE:
            given = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
            true = true_outputs(target, given, gradients=self.captured.gradients)
            result = [
                fake if real is None or real.untyped_storage().nbytes() == fake.untyped_storage().nbytes() else real
                for fake, real in zip(result, true)
            ]
        returns, nested = self._returns(node, target, result)
        created = {self.values[v].storage for v in returns if v >= 0} & self._fresh
        replay = replay_arguments(target, args)
        module = node.meta.get(PATH, "")
        phase: Phase = node.meta.get(PHASE, "backward")
        if phase == "backward":
            module = next(
                (
                    self._module_of_storage[s]
                    for v in reversed(reads)
                    if (s := self.values[v].storage) in self._module_of_storage
                ),
                module,
            )
        for storage in created:
            self._module_of_storage.setdefault(storage, module)
        self.calls.append(
            Call(
                call=len(self.calls),
                target=str(target),
                arguments=encoded,
                reads=tuple(reads),
                returns=tuple(returns),
                returns_many=bool(returns) and isinstance(result, (list, tuple)),
                mutates=tuple(sorted(mutated - created)),
                is_view=not mutated and not created and any(v >= 0 for v in returns),
                is_random=is_random(target),
                replay_arguments="" if replay is None else self._encode(replay, kwargs, []),
                phase=phase,
                module=module,
                location=_location(node.meta.get(LOCATION, "")),
                signature=call_signature(
                    str(target), self._encode(*without_numbers(target, args, kwargs), []), self.values
                ),
                groups=groups_of(result) if returns else (),
                function=self._functions.get(node, -1),
            )
        )
        self._value_of[node] = nested

    def _returns(self, node: fx.Node, target: OpOverload, result: Any) -> tuple[list[int], Any]:
        self._fresh: set[int] = set()
        outputs = flat_results(result)
        returns: list[int] = []
        for i, tensor in enumerate(outputs):
            if not isinstance(tensor, torch.Tensor):
                if tensor is not None and not isinstance(tensor, (bool, int, float)):
                    raise TraceError(f"Operator {target} returns {type(tensor).__name__}, which cannot be planned.")
                returns.append(-1)
                continue
            storage = self._storage_of.get(tensor.untyped_storage()._cdata)
            if storage is None:
                storage = self._new_storage(tensor, "temporary", f"{node.name}" + (f".{i}" if len(outputs) > 1 else ""))
                self._fresh.add(storage)
            name = node.name if len(outputs) == 1 else f"{node.name}_{i}"
            returns.append(self._value(tensor, storage, len(self.calls), i, name))
        many = isinstance(result, (list, tuple))
        return returns, (grouped(returns, groups_of(result)) if many else returns[0])

    def _encode(self, args: list[Any], kwargs: dict[str, Any], reads: list[int]) -> str:
        def tensor(item: Any) -> Any:
            if not isinstance(item, fx.Node):
                return None
            reads.append(self._value_of[item])
            return {"value": reads[-1]}

        return encode(args, kwargs, tensor)

    def _outputs(self, node: fx.Node) -> None:
        outputs: Any = node.args[0]
        count = len(outputs) - len(self.captured.trainable)
        gradients = outputs[count:]
        self.outputs = [self._value_of[output] for output in outputs[:count]]
        for name, gradient in zip(self.captured.trainable, gradients, strict=True):
            value = -1 if gradient is None else self._value_of[gradient]
            self.gradients.append(Gradient(name, self._parameters[name], value))


def _backward_functions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the number of the backward function that makes each call, or makes the backward of a forward call."""
    numbers: dict[int, int] = {}
    found: dict[fx.Node, int] = {}
    calls = [node for node in graph.nodes if FUNCTION in node.meta]
    for node in calls:
        if node.meta[PHASE] == "backward":
            found[node] = numbers.setdefault(node.meta[FUNCTION], len(numbers))
    of_forward: dict[int, fx.Node] = {}
    for node in calls:
        if node.meta[PHASE] != "backward" and node.meta[FUNCTION] in numbers:
            of_forward.setdefault(numbers[node.meta[FUNCTION]], node)
    return found | {node: number for number, node in of_forward.items()}


def _location(line: str) -> str:
    """Return `package/file.py:line`, independent of where packages are installed."""
    file, colon, number = line.rpartition(":")
    if not colon:
        return ""
    short = file.split(f"site-packages{os.sep}")[-1]
    return f"{os.path.relpath(short) if os.path.isabs(short) else short}:{number}"
