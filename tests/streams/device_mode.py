"""Tensors on the CPU as if they were on a GPU: what is called is queued on the compute stream, results come later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from stowage.stages.trace.calls.operators import is_random, mutated_arguments
from tests.streams.machine import HOST, Machine

aten: Any = torch.ops.aten

_FORM_ONLY = {
    aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor, aten._unsafe_view.default,
    aten._has_compatible_shallow_copy_type.default,
}  # fmt: skip
_ASKS = {aten._local_scalar_dense.default, aten.equal.default}
_FILLS = {
    aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.bernoulli_.float,
    aten.bernoulli_.Tensor, aten.normal_.default, aten.uniform_.default, aten.random_.default, aten.random_.to,
    aten.exponential_.default,
}  # fmt: skip
"""Write all of their first argument without reading it."""
_AT_ONCE = {aten.mkldnn_rnn_layer_backward.default}
"""Would not survive arguments that are made up."""


@dataclass(frozen=True)
class _Made:
    """Form of a new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Given:
    """The argument at a position of the flat list of arguments, written in place."""

    position: int


class DeviceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of the host's thread, while the model of a device is used. New tensors without arguments are on the device."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine
        self._forms: dict[Any, tuple[list[Any], Any]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Views and forms at once, the rest queued; a number that the host asks for is waited for."""
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        machine = self._machine
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        here = [t for t in tensors if machine.arena.block_of(t) is not None]
        if func in _FORM_ONLY or _is_view(func):
            return func(*args, **kwargs)
        if tensors and not here:
            return on_host(machine, func, args, kwargs)
        if not tensors and not _makes_memory(func, kwargs):
            return func(*args, **kwargs)
        to_host = func is aten.copy_.default and machine.arena.block_of(args[0]) is None
        if func in _ASKS or to_host:
            machine.finish_stream("compute")
            machine.touch(machine.touches(here, "reads"), f"{_name(func)}, {machine.where()}")
            return func(*args, **kwargs)
        return self._queue(func, flat, spec, here)

    def _queue(self, func: OpOverload, flat: list[Any], spec: Any, here: list[torch.Tensor]) -> Any:
        machine = self._machine
        args, _ = tree_unflatten(flat, spec)
        written = self._written(func, args)
        state = torch.get_rng_state() if is_random(func) else None
        if func in _AT_ONCE:
            return self._at_once(func, flat, spec, here)
        outputs, form = self._form_of(func, flat, spec)
        results: list[Any] = []
        for output in outputs:
            if isinstance(output, _Made):
                results.append(machine.arena.empty(output.shape, output.stride, output.dtype))
            else:
                results.append(flat[output.position] if isinstance(output, _Given) else output)
        made = [r for r, o in zip(results, outputs) if isinstance(o, _Made)]
        label = f"{_name(func)}, {machine.where()}"
        self._name(made, label)
        if func.overloadpacket not in (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty):
            skipped = {id(args[0])} if func in _FILLS else set()
            reads = [t for t in here if id(t) not in skipped]
            touches = [*machine.touches(reads, "reads"), *machine.touches([*written, *made], "writes")]
            machine.work("compute", self._kernel(func, flat, spec, outputs, results, state), touches, label)
        return tree_unflatten(results, form)

    def _name(self, made: Sequence[torch.Tensor], label: str) -> None:
        for tensor in made:
            block = self._machine.arena.block_of(tensor)
            if block is not None:
                block.owner = label.partition(", ")[2].rpartition(": ")[2].partition(" = ")[0]

    def _written(self, func: OpOverload, args: Sequence[Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for position in mutated_arguments(func, list(args)):
            if position < len(args):
                found += [t for t in tree_flatten(args[position])[0] if isinstance(t, torch.Tensor)]
        return found

    def _kernel(
        self,
        func: OpOverload,
        flat: list[Any],
        spec: Any,
        outputs: list[Any],
        results: list[Any],
        state: torch.Tensor | None,
    ) -> Callable[[], object]:
        """What the stream runs; it holds no memory of the device, and numbers on the host as they are now."""
        machine = self._machine
        if not machine.values:
            return lambda: None
        held = [self._held(x) for x in flat]
        places = [machine.untracked(r) for r, o in zip(results, outputs) if isinstance(o, _Made)]
        gradients = torch.is_grad_enabled()

        def run() -> None:
            args, kwargs = tree_unflatten(held, spec)
            now = torch.get_rng_state()
            if state is not None:
                torch.set_rng_state(state)
            with torch.set_grad_enabled(gradients), torch._C._AutoDispatchBelowAutograd():
                found, _ = tree_flatten(func(*args, **kwargs))
                for place, value in zip(places, [v for v, o in zip(found, outputs) if isinstance(o, _Made)]):
                    place.copy_(value)
            if state is not None:
                torch.set_rng_state(now)

        return run

    def _held(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if self._machine.arena.block_of(item) is not None:
            return self._machine.untracked(item)
        return item.detach().clone()

    def _form_of(self, func: OpOverload, flat: list[Any], spec: Any) -> tuple[list[Any], Any]:
        """Forms of what it returns, learnt from a run on zeros; that run draws as many random numbers."""
        key = (
            func,
            torch.is_grad_enabled(),
            spec,
            *(_form(x) if isinstance(x, torch.Tensor) else repr(x) for x in flat),
        )
        if key in self._forms and not is_random(func):
            return self._forms[key]
        zeros = [_zeros(x) if isinstance(x, torch.Tensor) else x for x in flat]
        args, kwargs = tree_unflatten(zeros, spec)
        with torch._C._AutoDispatchBelowAutograd():
            found, form = tree_flatten(func(*args, **kwargs))
        given = {id(z): i for i, z in enumerate(zeros) if isinstance(z, torch.Tensor)}
        outputs: list[Any] = []
        for item in found:
            if id(item) in given:
                outputs.append(_Given(given[id(item)]))
            elif isinstance(item, torch.Tensor):
                outputs.append(_Made(tuple(item.shape), item.stride(), item.dtype))
            else:
                outputs.append(item)
        self._forms[key] = outputs, form
        return outputs, form

    def _at_once(self, func: OpOverload, flat: list[Any], spec: Any, here: list[torch.Tensor]) -> Any:
        """Wait for the stream and run it."""
        machine = self._machine
        machine.finish_stream("compute")
        label = f"{_name(func)}, {machine.where()}"
        machine.touch(machine.touches(here, "reads"), label)
        args, kwargs = tree_unflatten([self._held(x) for x in flat], spec)
        with torch._C._AutoDispatchBelowAutograd():
            found, form = tree_flatten(func(*args, **kwargs))
        results = []
        for item in found:
            if not isinstance(item, torch.Tensor):
                results.append(item)
                continue
            made = machine.arena.empty(tuple(item.shape), item.stride(), item.dtype)
            self._name([made], label)
            place = machine.untracked(made)
            machine.work("compute", lambda p=place, i=item: p.copy_(i), machine.touches([made], "writes"), label)
            results.append(made)
        return tree_unflatten(results, form)


class HostMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of a thread that computes in memory of the host."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Done at once, and noted."""
        return func(*args, **(kwargs or {})) if _is_view(func) else on_host(self._machine, func, args, kwargs or {})


def on_host(machine: Machine, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call on tensors in memory of the host, by whoever runs now."""
    if func in _FORM_ONLY:
        return func(*args, **kwargs)
    flat, _ = tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    written = [
        t
        for i in mutated_arguments(func, list(args))
        if i < len(args)
        for t in tree_flatten(args[i])[0]
        if isinstance(t, torch.Tensor)
    ]
    touches = [*machine.touches(tensors, "reads"), *machine.touches(written, "writes")]
    if touches:
        machine.touch(touches, f"{_name(func)}, {machine.where()}")
    return func(*args, **kwargs)


def _name(func: OpOverload) -> str:
    return str(func).removeprefix("aten.")


def _is_view(func: OpOverload) -> bool:
    schema = func._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    return any(r.alias_info is not None for r in schema.returns)


def _makes_memory(func: OpOverload, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    return any("Tensor" in str(r.type) for r in func._schema.returns)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.zero_() if made.numel() and tensor.device.type == "cpu" else made


__all__ = ["HOST", "DeviceMode", "HostMode", "on_host"]
