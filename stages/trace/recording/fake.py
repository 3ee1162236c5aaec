"""Corrects fake kernels to return what real ones do: the same strides, sizes of storages and sharing of memory.

PyTorch's fake kernels are written by hand for some operators, and a few differ: a channels_last `roll` comes out
contiguous in reality, the scalar of `mse_loss` keeps a storage as large as its input. So every distinct call of a trace
is also run once, on made-up tensors: small ones as they are, large ones in a smaller form with the same pattern of
strides, first to see whether fake and real agree there. Differences that this misses are found when calls are profiled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from stowage.stages.ir.operators import OPAQUE, SEALS, without_overload
from stowage.stages.ir.results import flat_results, grouped, groups_of
from stowage.stages.ir.trace import form_text
from stowage.stages.kernels import (
    SUBSTITUTES,
    Around,
    Form,
    Output,
    Outputs,
    kinds_of,
    known_outputs,
    made_up,
    outputs_of,
)
from stowage.stages.kernels.failed import raise_if_failed
from stowage.stages.trace.calls.encoding import encode
from stowage.stages.trace.calls.scalars import without_numbers
from stowage.stages.trace.recording.smaller import larger, smaller
from stowage.stages.workload.autocast import without_autocast

aten: Any = torch.ops.aten

SMALL_BYTES = 1 << 20
"""The most bytes that a call may touch to be run in its own size at once."""

MOST_BYTES = 64 << 20
"""The most bytes that a call may touch to be run in its own size at all while tracing."""

MOST_KINDS = 6
"""The most kinds of contents that are tried while tracing; profiling tries all."""


class TrueKernels:
    """Calls operators on fake tensors, under any active fake mode, and corrects the results."""

    def __init__(self) -> None:
        self._known = known_outputs()

    def __call__(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the real kernel returns, without contents."""
        return self._corrected(func, args, kwargs, SUBSTITUTES.get(func, func)(*args, **kwargs))

    def _corrected(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in flat_results(result) if isinstance(t, torch.Tensor)]
        if not outputs or not all(map(_plain, [*tensors, *outputs])):
            return result
        true: Outputs | None = None
        tells = bool(tensors) and any(t.numel() for t in outputs)
        if tells and (_may_differ(func) or (_is_view(func) and any(1 in t.shape for t in outputs))):
            start = tensors[0].storage_offset() if _is_view(func) else 0
            key = (func, _key(args), _key(list(kwargs.items())), tensors[0].device.type, start)
            known = self._known.tried
            if key not in known:
                known[key] = self._differing(func, args, kwargs, tensors, result)
            true = known[key]
        if self._known.measured:
            true = self._known.measured.get(signature_of(func, args, kwargs), true)
        return result if true is None else self._remade(result, true, tensors)

    def _differing(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        result: Any,
    ) -> Outputs | None:
        """Return what the real kernel returns, if that is known and differs from the fake result; else None."""
        device = tensors[0].device
        if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
            return None
        fake = outputs_of(result, tensors)
        flat = flat_results(result)
        touched = sum(
            t.untyped_storage().nbytes() for t in (*tensors, *(t for t in flat if isinstance(t, torch.Tensor)))
        )
        forms = [Form.of(t) for t in tensors]
        if _is_view(func):
            real = _viewed(func, args, kwargs, forms, device)
            return None if real is None or real == fake else real
        if touched > SMALL_BYTES:
            agreed, transferred = self._in_small(func, args, kwargs, forms, fake, device)
            if agreed:
                return transferred
        if touched > MOST_BYTES:
            return None
        real = _run(func, args, kwargs, forms, device)
        return None if real is None or real == fake or len(real) != len(fake) else real

    def _in_small(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        forms: Sequence[Form],
        fake: Outputs,
        device: torch.device,
    ) -> tuple[bool, Outputs | None]:
        """Say whether a smaller call tells what the real one returns, and return that if the fake result differs."""
        small, number = smaller(forms)
        if small == list(forms):
            return False, None
        few_args, few_kwargs = _renumbered(func, args, kwargs, number)
        key = (func, _key(_without_tensors(few_args)), _key(_without_tensors(few_kwargs)), tuple(small), device.type)
        known = self._known.small
        if key not in known:  # many calls have the same smaller call
            known[key] = _both(func, few_args, few_kwargs, small, device)
        real, pretended = known[key] or (None, None)
        if real is None:
            return False, None
        if real == pretended:
            return True, None
        whole = larger(real, fake, small, forms)
        return whole is not None, whole

    def _remade(self, result: Any, true: Outputs, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the fake result, corrected to what the real kernel returns."""
        flat = flat_results(result)
        fake = outputs_of(result, tensors)
        if len(flat) != len(true) or len(fake) != len(true):
            return result
        remade: list[Any] = []
        changed: set[int] = set()
        for i, (old, was, now) in enumerate(zip(flat, fake, true)):
            if was is None or now is None or (now.output >= 0 and fake[now.output] is None):
                remade.append(old)
                continue
            has_elements = old.numel() or now.nbytes or math.prod(now.form.shape)
            if has_elements and (was != now or now.output in changed):
                changed.add(i)
                old = self._made(old, now, tensors, remade)
            remade.append(old)
        return type(result)(grouped(remade, groups_of(result))) if isinstance(result, (list, tuple)) else remade[0]

    def _made(
        self, old: torch.Tensor, true: Output, tensors: Sequence[torch.Tensor], before: Sequence[Any]
    ) -> torch.Tensor:
        form = true.form
        with torch.no_grad():
            if true.argument >= 0:
                whole = tensors[true.argument]
                if form.shape == tuple(whole.shape) and form.stride == tuple(whole.stride()):
                    return aten.alias.default(whole)  # type: ignore[no-any-return]  # offsets of equal calls differ
            elif true.output >= 0:
                whole = before[true.output]
            else:
                whole = torch.empty(true.nbytes // form.dtype.itemsize, dtype=form.dtype, device=old.device)
            return aten.as_strided.default(  # type: ignore[no-any-return]
                whole, form.shape, form.stride, form.offset
            )


@functools.cache
def _may_differ(func: OpOverload) -> bool:
    """Say whether the operator makes new tensors from tensors, so that it is no view and no factory."""
    schema = func._schema
    if func.namespace != "aten" or str(func) in OPAQUE or without_overload(str(func)) in SEALS.values():
        return False
    if func._schema.name.startswith("aten::empty") or func in _AS_GIVEN:
        return False
    made = [r for r in schema.returns if r.alias_info is None and "Tensor" in str(r.type)]
    return bool(made) and any("Tensor" in str(a.type) for a in schema.arguments)


@functools.cache
def _is_view(func: OpOverload) -> bool:
    """Say whether the operator returns a view; fake kernels may give other strides to dimensions of size 1."""
    return bool(func.is_view) and func.namespace == "aten" and not func._schema.is_mutable


_AS_GIVEN = {
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten._local_scalar_dense.default,
}


def _plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is strided, of known shape, and neither conjugated, negated nor quantized."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    return not (isinstance(tensor, FakeTensor) and (tensor._has_symbolic_sizes_strides or tensor.constant is not None))


def _key(item: Any) -> Hashable:
    """Return a key that is equal for calls that return equal forms."""
    if isinstance(item, torch.Tensor):
        return item.dtype, tuple(item.shape), tuple(item.stride()), item.storage_offset() % 64
    if isinstance(item, (list, tuple)):
        return tuple(map(_key, item))
    return type(item), str(item) if isinstance(item, float) else item


def _without_tensors(arguments: Any) -> Any:
    """Return the arguments with a mark in place of each tensor; dictionaries become lists of their items."""
    items = list(arguments.items()) if isinstance(arguments, dict) else arguments
    return pytree.tree_map_only(torch.Tensor, lambda _: torch.Tensor, items)


def signature_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the `Call.signature` of the call that is recorded for these arguments."""

    def form(item: Any) -> str | None:
        if not isinstance(item, torch.Tensor):
            return None
        shape, stride = tuple(item.shape), tuple(item.stride())
        return form_text(str(item.dtype).removeprefix("torch."), shape, stride, int(item.storage_offset()))

    return f"{func}{encode(*without_numbers(func, args, dict(kwargs)), form)}"


def _filled(args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Return the arguments with `tensors` in place of theirs, in order."""
    rest = iter(tensors)
    filled: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, lambda _: next(rest), (tuple(args), dict(kwargs)))
    return filled


def _empty(form: Form, device: torch.device) -> torch.Tensor:
    base = torch.empty(form.span, dtype=form.dtype, device=device)
    return base.as_strided(form.shape, form.stride, form.offset if form.span else 0)


def _renumbered(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], number: Mapping[int, int]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with the smaller sizes in place of the original ones."""

    def renumber(argument: Any, value: Any) -> Any:
        if "SymInt" not in str(argument.real_type) or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return number.get(value, value)
        if isinstance(value, (list, tuple)):
            return [number.get(n, n) if isinstance(n, int) else n for n in value]
        return value

    arguments = func._schema.arguments
    by_name = {a.name: a for a in arguments}
    return (
        [renumber(a, value) for a, value in zip(arguments, args)],
        {name: renumber(by_name[name], value) for name, value in kwargs.items()},
    )


@contextmanager
def _really() -> Iterator[None]:
    """Let operators run on real tensors inside the block, outside of all modes."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), without_autocast():
        yield


def _viewed(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[Form], device: torch.device
) -> Outputs | None:
    """Return the output of a real view; it touches no memory, so any size is possible."""
    with _really():
        try:
            tensors = [_empty(form, device) for form in forms]
            a, k = _filled(args, kwargs, tensors)
            return outputs_of(func(*a, **k), tensors)
        except Exception:  # whatever a kernel raises
            return None


def _run(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[Form], device: torch.device
) -> Outputs | None:
    """Return what the real kernel returns on tensors of these forms; None if it accepts none of the contents tried."""
    around = Around.of(forms, [*args, *kwargs.values()])
    devices = [device.index or 0] if device.type == "cuda" else []
    with _really(), torch.random.fork_rng(devices=devices):
        for kind in kinds_of(str(func))[:MOST_KINDS]:
            try:
                tensors = [made_up(form, device, kind, around) for form in forms]
                a, k = _filled(args, kwargs, tensors)
                return outputs_of(func(*a, **k), tensors)
            except Exception as problem:  # whatever a kernel raises: these contents are outside its domain
                raise_if_failed(problem, str(func))
    return None


def _both(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[Form], device: torch.device
) -> tuple[Outputs, Outputs] | None:
    """Return what the real and the fake kernel return; None if one of them does not accept such arguments."""
    real = _run(func, args, kwargs, forms, device)
    if real is None:
        return None
    try:
        with torch.no_grad():
            made = [_empty(form, device) for form in forms]
            a, k = _filled(args, kwargs, made)
            return real, outputs_of(func(*a, **k), made)
    except Exception:  # whatever a kernel raises at arguments that do not fit together
        return None
