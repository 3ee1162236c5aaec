"""Runs the forward and backward of a trace, call by call, on a model's own tensors; nothing of the model changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.arguments import map_arguments
from stowage.stages.ir.operators import OPAQUE
from stowage.stages.ir.results import flat_results
from stowage.stages.ir.trace import Call, Constant, TraceTables, Value
from stowage.stages.structure import tensors_of


@dataclass(frozen=True)
class StepTensors:
    """The tensors that a step reads, as they are now.

    Attributes:
        parameters, buffers: those of the model, by name.
        inputs: the tensors of the batch, in order.
        outside: tensors that belong to neither, by the names of the trace.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    inputs: Sequence[torch.Tensor]
    outside: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module, batch: Any, outside: Mapping[str, torch.Tensor] | None = None) -> StepTensors:
        """Return the tensors of a model and a batch."""
        names = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return StepTensors(names, buffers, tensors_of(batch), outside or {})

    @property
    def device(self) -> torch.device:
        """Return the device that the step runs on."""
        return next((p.device for p in self.parameters.values()), torch.device("cpu"))


def run_trace(trace: TraceTables, live: StepTensors) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run forward and backward.

    What the step would change in place is changed in copies, and tensors are freed after their last use.

    Returns:
        The loss, and the gradient of each parameter by name.
    """
    with torch.no_grad():
        return _Run(trace, live).results()


class StoredForward:
    """The forward of a trace on one batch, with what backward reads of it, so that several backwards can follow."""

    def __init__(self, trace: TraceTables, live: StepTensors, packed: Iterable[TraceTables]) -> None:
        """Run forward once, and keep what the backward of the trace, and of rewrites of it, will read."""
        self._live = live
        self._own = own = {v.name for v in trace.values}
        wanted = set(_needed(trace, frozenset()))
        for each in packed:
            wanted.update(own.intersection(_needed(each, own)))
        run = _Run(trace, live)
        with torch.no_grad():
            run.execute([c for c in trace.calls if c.phase == "forward"], wanted)
        self._kept = {trace.values[v].name: t for v, t in run.tensors.items() if trace.values[v].name in wanted}

    def gradients(self, trace: TraceTables) -> dict[str, torch.Tensor]:
        """Run the backward of the trace or of a rewrite of it; what forward packs there is packed first."""
        run = _Run(trace, self._live)
        calls = _remaining(trace, self._own)
        changed = {s for c in calls for s in c.mutates}
        copies: dict[int, torch.Tensor] = {}
        for value in trace.values:
            if value.call >= 0 and value.name in self._kept:
                kept = self._kept[value.name]
                if value.storage in changed:
                    if value.storage not in copies:
                        whole = torch.empty(0, dtype=torch.uint8, device=kept.device).set_(kept.untyped_storage())
                        copies[value.storage] = whole.clone()
                    place = kept.storage_offset(), kept.shape, kept.stride()
                    own = copies[value.storage].untyped_storage()
                    kept = torch.empty(0, dtype=kept.dtype, device=kept.device).set_(own, *place)
                run.tensors[value.value] = kept
        with torch.no_grad():
            return run.gradients(calls)


def _remaining(trace: TraceTables, own: Container[str]) -> list[Call]:
    """Return the calls that are needed and that the forward with values of these names has not executed, in order."""
    needed = {g.gradient_value for g in trace.gradients if g.gradient_value >= 0}
    found: list[Call] = []
    written: set[int] = set()
    old = {v.storage for v in trace.values if v.name in own}
    for call in reversed(trace.calls):
        if call.phase == "update" or (call.phase == "forward" and _is_old(trace, call, own, old)):
            continue
        if needed.intersection(call.returns) or written.intersection(call.mutates):
            needed.update(call.reads)
            written.update(call.mutates)
            written.update(trace.values[v].storage for v in call.reads)
            found.append(call)
    return found[::-1]


def _is_old(trace: TraceTables, call: Call, own: Container[str], storages: Container[int]) -> bool:
    """Say whether a call makes or changes only what there is without the rewrite, so that it has been executed."""
    made = [v for v in call.returns if v >= 0]
    return all(trace.values[v].name in own for v in made) and all(s in storages for s in call.mutates)


def _needed(trace: TraceTables, own: Container[str]) -> Iterator[str]:
    """Yield the names of the values of forward that backward, and calls that are new in a rewrite, read."""
    for call in trace.calls:
        new = call.phase != "forward" or (own and any(trace.values[v].name not in own for v in call.returns if v >= 0))
        if new and call.phase != "update":
            yield from (trace.values[v].name for v in call.reads)


class _Run:
    """Executes the calls of one trace."""

    def __init__(self, trace: TraceTables, live: StepTensors) -> None:
        self._trace, self._live = trace, live
        self._calls = [c for c in trace.calls if c.phase != "update"]
        changed = {s for c in self._calls for s in c.mutates}
        read = {v for c in self._calls for v in c.reads}
        self.tensors: dict[int, torch.Tensor] = {}
        inputs = iter(live.inputs)
        constants = {c.value: c for c in trace.constants}
        for value in trace.values:
            if value.call >= 0 or not value.source:
                continue
            tensor = self._source(value, inputs, constants) if value.value in read or _is_input(value) else None
            if tensor is not None and value.value in read:
                self.tensors[value.value] = tensor.clone() if value.storage in changed else tensor

    def _source(self, value: Value, inputs: Any, constants: Mapping[int, Constant]) -> torch.Tensor:
        role, _, name = value.source.partition(":")
        live = self._live
        match role:
            case "input":
                found: torch.Tensor = next(inputs)
            case "parameter":
                found = live.parameters[name] if name in live.parameters else live.outside[name]
            case "buffer":
                found = live.buffers[name]
            case "constant":
                found = _constant(constants[value.value], value).to("cpu" if value.on_host else live.device)
            case _:
                found = live.outside[name]
        return found.detach()

    def results(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run everything."""
        loss = self._trace.values[self._trace.meta.loss_value]
        found = self.gradients(self._calls, {loss.name})
        return self.tensors[loss.value], found

    def gradients(self, calls: Sequence[Call], wanted: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Run some calls and return the gradients."""
        rows = self._trace.values
        names = {g.parameter: g.gradient_value for g in self._trace.gradients if g.gradient_value >= 0}
        self.execute(calls, {*wanted, *(rows[v].name for v in names.values())})
        return {name: self.tensors[value] for name, value in names.items()}

    def execute(self, calls: Sequence[Call], wanted: Collection[str]) -> None:
        """Run some calls; tensors are freed after their last use, but for those with a wanted name."""
        last: dict[int, int] = {}
        for position, call in enumerate(calls):
            last.update(dict.fromkeys([*call.reads, *(v for v in call.returns if v >= 0)], position))
        dying: dict[int, list[int]] = defaultdict(list)
        for value, position in last.items():
            if self._trace.values[value].name not in wanted:
                dying[position].append(value)
        for position, call in enumerate(calls):
            self._execute(call)
            for value in dying[position]:
                del self.tensors[value]

    def _execute(self, call: Call) -> None:
        args, kwargs = map_arguments(call.arguments, self._leaf)
        namespace, name, overload = call.target.split(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        if call.target in OPAQUE:
            with torch.enable_grad():
                made = operator(*args, **kwargs)
        else:
            made = operator(*args, **kwargs)
        for value, tensor in zip(call.returns, flat_results(made), strict=True):
            if value >= 0:
                self.tensors[value] = tensor.detach()

    def _leaf(self, key: str, content: Any) -> Any:
        match key:
            case "value":
                return self.tensors[content]
            case "float":
                return float(content)
            case "complex":
                return complex(*content)
            case "device":
                return torch.device("cpu") if torch.device(content).type == "cpu" else self._live.device
            case _:
                return getattr(torch, content)


def _is_input(value: Value) -> bool:
    return value.source.startswith("input:")


def _constant(constant: Constant, value: Value) -> torch.Tensor:
    dtype = getattr(torch, value.dtype)
    if not constant.content:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(bytearray(constant.content), dtype=dtype).reshape(value.shape)
