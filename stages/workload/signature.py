"""Takes what a traced step depends on besides the numbers in its tensors, for a batch and for a model.

A traced step replays the calls of one forward. If something that steered those calls differs later (a Python number in
the batch, dropout switched off, a weight frozen), the step would silently give wrong gradients. So both signatures are
taken when tracing, stored with the plan as JSON, and compared on every training step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as module_globals

from stowage.stages.structure import Part, parts
from stowage.stages.structure.values import value_text
from stowage.stages.workload.values_looked_at import looked_at

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module that contain its hooks."""

_PLAIN = frozenset((bool, int, float, str))
# Attributes that steer nothing in forward; `training` is a column of its own.
_IGNORED = frozenset(("training", "_is_full_backward_hook", "call_super_init", "_is_hf_initialized", "name_or_path"))
_dtype_names: dict[torch.dtype, str] = {}
_AT_MOST = 8


class Leaf(NamedTuple):
    """One leaf of a batch, or an empty container.

    Attributes:
        path: the Python expression that reaches it: `batch['labels']`.
        kind: `tensor`, or the type's name.
        value: a tensor's dtype, shape, strides, device and requires_grad as text; else the value's `repr`.
        same_as: path of an earlier leaf that is the same tensor object, "" for none.
    """

    path: str
    kind: str
    value: str
    same_as: str


class Module(NamedTuple):
    """One module: its path, class, mode, number of hooks, plain attributes, and own parameters and buffers."""

    path: str
    kind: str
    training: bool
    hooks: int
    attributes: tuple[tuple[str, Any], ...]
    tensors: tuple[tuple[str, tuple[int, ...], str, bool, str], ...]


@dataclass(frozen=True)
class BatchSignature:
    """The structure of a batch: every tensor's form, every other leaf's value."""

    leaves: tuple[Leaf, ...]

    def differences(self, other: BatchSignature) -> list[str]:
        """List how `other` (the batch at hand) departs from this one (the batch that was traced); empty when equal."""
        if self.leaves == other.leaves:
            return []
        mine, theirs = {leaf.path: leaf for leaf in self.leaves}, {leaf.path: leaf for leaf in other.leaves}
        found = [f"{p} is missing; the step was traced with it." for p in mine if p not in theirs]
        found += [f"{p} is new; the step was traced without it." for p in theirs if p not in mine]
        for path in (p for p in mine if p in theirs):
            found += _leaf_differences(mine[path], theirs[path])
        return _shorten(found or ["the batch has the same parts in another order."])

    def to_json(self) -> str:
        """Return canonical text: equal signatures have equal text."""
        return json.dumps([list(leaf) for leaf in self.leaves], separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> BatchSignature:
        """Read what `to_json` wrote."""
        return BatchSignature(tuple(Leaf(*row) for row in json.loads(text)))


@dataclass(frozen=True)
class ModelSignature:
    """Modes, hooks, plain attributes, the form of parameters and buffers, and the global switches around them."""

    modules: tuple[Module, ...]
    context: tuple[tuple[str, str], ...]

    def differences(self, other: ModelSignature) -> list[str]:
        """List how `other` (the model now) departs from this one (the model that was traced); empty when equal."""
        if self == other:
            return []
        now, traced = dict(other.context), dict(self.context)
        found = [
            f"{k} is {now.get(k, 'gone')}; the step was traced with {v}." for k, v in self.context if now.get(k) != v
        ]
        found += [f"{k} is {v}; the step was traced without it." for k, v in other.context if k not in traced]
        mine, theirs = {m.path: m for m in self.modules}, {m.path: m for m in other.modules}
        found += [f"{_place(p)} is gone; the step was traced with it." for p in mine if p not in theirs]
        found += [f"{_place(p)} is new; the step was traced without it." for p in theirs if p not in mine]
        for path in (p for p in mine if p in theirs):
            found += _module_differences(mine[path], theirs[path])
        return _shorten(found or ["the model has the same modules in another order."])

    def to_json(self) -> str:
        """Return canonical text: equal signatures have equal text."""
        content = {"modules": [list(m) for m in self.modules], "context": list(self.context)}
        return json.dumps(content, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> ModelSignature:
        """Read what `to_json` wrote."""
        raw = json.loads(text)
        modules = tuple(
            Module(
                path, kind, training, hooks,
                tuple((k, v) for k, v in attributes),
                tuple((name, tuple(shape), dtype, grad, same) for name, shape, dtype, grad, same in tensors),
            )
            for path, kind, training, hooks, attributes, tensors in raw["modules"]
        )  # fmt: skip
        return ModelSignature(modules, tuple((k, v) for k, v in raw["context"]))


def batch_signature(batch: Any) -> BatchSignature:
    """Return the signature of a batch: the form of every tensor, and the value of everything else that has one.

    Raises:
        ParameterError: the batch reaches more objects than a batch may.
    """
    leaves: list[Leaf] = []
    for part in parts(batch):
        leaves.append(_leaf(part))
        path, _, kind, item, _ = part
        found = looked_at(path, item) if kind == "tensor" else ""
        if found:
            leaves.append(Leaf(f"{path} (values)", "values", found, ""))
    return BatchSignature(tuple(leaves))


def model_signature(model: nn.Module) -> ModelSignature:
    """Return the signature of a model and of the switches that steer its forward, in microseconds per module."""
    return ModelSignature(module_rows(model), context())


def module_rows(model: nn.Module) -> tuple[Module, ...]:
    """List every module of a model, each once."""
    rows: list[Module] = []
    _walk_modules(model, "", rows, {}, set())
    return tuple(rows)


def _leaf(part: Part) -> Leaf:
    path, _, kind, item, same_as = part
    if kind == "tensor":
        return Leaf(path, "tensor", tensor_form(item), same_as)
    if same_as:
        return Leaf(path, type(item).__qualname__, "", same_as)
    if kind in ("mapping", "sequence", "set"):
        return Leaf(path, "mapping" if type(item) is dict else type(item).__qualname__, f"{len(item)} entries", "")
    return Leaf(path, type(item).__qualname__, "" if kind == "object" else value_text(item), "")


def tensor_form(tensor: torch.Tensor) -> str:
    """Return the properties of a batch's tensor that a traced step depends on, as text."""
    layout = f"strides {tensor.stride()}" if tensor.layout is torch.strided else str(tensor.layout)
    form = f"{_dtype(tensor.dtype)} {tuple(tensor.shape)} {layout} on {tensor.device}"
    return f"{form} requires_grad" if tensor.requires_grad else form


def _walk_modules(module: nn.Module, path: str, rows: list[Module], names: dict[int, str], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    state = module.__dict__
    hooks = 0
    for name in HOOKS:
        if state[name]:
            hooks += len(state[name])
    prefix = f"{path}." if path else ""
    tensors = []
    for table in (state["_parameters"], state["_buffers"]):
        for name, tensor in table.items():
            if tensor is None:
                continue
            full = prefix + name
            first = names.setdefault(id(tensor), full)
            tensors.append(
                (name, tuple(tensor.shape), _dtype(tensor.dtype), tensor.requires_grad, "" if first == full else first)
            )
            if tensor._backward_hooks:
                hooks += len(tensor._backward_hooks)
            if tensor._post_accumulate_grad_hooks:
                hooks += len(tensor._post_accumulate_grad_hooks)
    attributes = plain_attributes(state)
    if "forward" in state:  # it hides the class's own
        attributes += (("forward", getattr(state["forward"], "__qualname__", type(state["forward"]).__qualname__)),)
    rows.append(Module(path, type(module).__qualname__, module.training, hooks, attributes, tuple(tensors)))
    for name, child in state["_modules"].items():
        if child is not None:
            _walk_modules(child, prefix + name, rows, names, seen)


def plain_attributes(state: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the plain attributes of a module that may steer its forward."""
    return tuple([(k, v) for k, v in state.items() if type(v) in _PLAIN and k not in _IGNORED])


def context() -> tuple[tuple[str, str], ...]:
    """Return global switches that change which operators a forward calls."""
    state = []
    for device in ("cpu", "cuda"):
        enabled = torch.is_autocast_enabled(device)
        state.append((f"autocast on {device}", _dtype(torch.get_autocast_dtype(device)) if enabled else "off"))
    hooks = sum(
        not getattr(hook, "steers_nothing", False)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        for hook in getattr(module_globals, f"_global{name}", {}).values()
    )
    state.append(("the number of global module hooks", str(hooks)))
    state.append(("the default dtype", _dtype(torch.get_default_dtype())))
    state.append(("kernels that attention may take", _attention()))
    state.append(("cuDNN", "on" if torch._C._get_cudnn_enabled() else "off"))
    state.append(("oneDNN", "on" if torch._C._get_mkldnn_enabled() else "off"))
    state.append(("deterministic algorithms", "on" if torch.are_deterministic_algorithms_enabled() else "off"))
    return tuple(state)


def _attention() -> str:
    """Return the switches for the kernels of `scaled_dot_product_attention`, with the order in which they are tried."""
    ask = torch._C
    order = getattr(ask, "_get_sdp_priority_order", None)
    on = (ask._get_flash_sdp_enabled(), ask._get_mem_efficient_sdp_enabled(), ask._get_math_sdp_enabled())
    return f"{on} {ask._get_cudnn_sdp_enabled()} {order() if order is not None else ''}"


def _dtype(dtype: torch.dtype) -> str:
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def _leaf_differences(before: Leaf, now: Leaf) -> list[str]:
    if (before.kind, before.value) != (now.kind, now.value):
        return [f"{before.path} is {_leaf_text(now)}; the step was traced with {_leaf_text(before)}."]
    if before.same_as != now.same_as:
        was, is_now = (f"the same tensor as {s}" if s else "a tensor of its own" for s in (before.same_as, now.same_as))
        return [f"{before.path} is {is_now}; the step was traced with {was}."]
    return []


def _leaf_text(leaf: Leaf) -> str:
    value = leaf.value if len(leaf.value) <= 120 else leaf.value[:117] + "…"
    return value if leaf.kind in ("NoneType", "bool", "int", "float", "str") else f"{leaf.kind} {value}"


def _module_differences(before: Module, now: Module) -> list[str]:
    place, found = _place(before.path), []
    if before.kind != now.kind:
        found.append(f"{place} is a {now.kind}; the step was traced with a {before.kind}.")
    if before.training != now.training:
        mode = {True: "training", False: "evaluation"}
        found.append(f"{place} is in {mode[now.training]} mode; the step was traced in {mode[before.training]} mode.")
    if before.hooks != now.hooks:
        found.append(f"{place} has {now.hooks} hooks; the step was traced with {before.hooks}.")
    old, new = dict(before.attributes), dict(now.attributes)
    for name in sorted(old.keys() | new.keys()):
        if (name in old) != (name in new) or type(old[name]) is not type(new[name]) or old[name] != new[name]:
            was, is_now = (repr(side[name]) if name in side else "absent" for side in (old, new))
            found.append(f"{place}: {name} is {is_now}; the step was traced with {was}.")
    mine, theirs = {t[0]: t for t in before.tensors}, {t[0]: t for t in now.tensors}
    prefix = f"{before.path}." if before.path else ""
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            was_text, now_text = _tensor_text(mine.get(name)), _tensor_text(theirs.get(name))
            found.append(f"{prefix}{name} is {now_text}; the step was traced with it {was_text}.")
    return found


def _tensor_text(tensor: tuple[str, tuple[int, ...], str, bool, str] | None) -> str:
    if tensor is None:
        return "absent"
    _, shape, dtype, grad, same = tensor
    tied = f", tied to {same}" if same else ""
    return f"{dtype} {shape}, {'trained' if grad else 'not trained'}{tied}"


def _place(path: str) -> str:
    return f"module {path}" if path else "the model"


def _shorten(sentences: list[str]) -> list[str]:
    if len(sentences) <= _AT_MOST:
        return sentences
    return [*sentences[:_AT_MOST], f"and {len(sentences) - _AT_MOST} more differences."]
