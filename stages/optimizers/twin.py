"""Copies an optimizer so that the copy has stand-ins in place of the parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stowage.stages.ir.errors import TraceError
from stowage.stages.optimizers.content import tensors_in
from stowage.stages.structure.kinds import dict_of

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_LEFT_OUT = {*_HOOKS, "step"}


def is_optimizer(item: Any) -> bool:
    """Say whether an object is an optimizer, or a wrapper that is used like one without being of PyTorch's class."""
    if isinstance(item, torch.optim.Optimizer):
        return True
    return not isinstance(item, type) and all(hasattr(item, name) for name in ("param_groups", "state", "step"))


def inner_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizer and those that it wraps."""
    seen: set[int] = set()
    waiting: list[Any] = [optimizer]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if is_optimizer(item):
            yield item
            waiting += reversed(list(vars(item).values()))
        elif type(item) in (list, tuple):
            waiting += [part for part in item if is_optimizer(part)]
        elif type(item) is dict:
            waiting += [part for part in item.values() if is_optimizer(part)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """List the parameters of all groups, once each."""
    found = {id(p): p for o in inner_optimizers(optimizer) for group in o.param_groups for p in group["params"]}
    return list(found.values())


def has_states(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the optimizer keeps anything yet: it has stepped, or creates its states when it is made."""
    return any(bool(o.state) for o in inner_optimizers(optimizer))


def twin_of(
    optimizer: torch.optim.Optimizer,
    stand_ins: Mapping[int, nn.Parameter],
    *,
    states: bool = False,
    mode: FakeTensorMode | None = None,
) -> torch.optim.Optimizer:
    """Return a copy that shares nothing with the original: stepping it changes only itself and the stand-ins.

    Groups that hold none of the parameters are left out, and so are hooks and schedules.

    Args:
        optimizer: the original; optimizers that it wraps are copied with it.
        stand_ins: identity of a parameter -> the stand-in for it.
        states: copy the states of these parameters too; by default the copy has none yet, as before the first step.
        mode: the fake mode in which states are copied, if they are to be fake.

    Raises:
        TraceError: the optimizer holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in parameters_of(optimizer):
        memo[id(parameter)] = stand_ins.get(id(parameter))
        if memo[id(parameter)] is None:
            memo[id(parameter)] = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
    originals = list(inner_optimizers(optimizer))
    twins: list[Any] = []
    for original in originals:
        kind: Any = type(original)
        twins.append(kind.__new__(kind))
        memo[id(original)] = twins[-1]
    try:
        with torch.no_grad():
            for original in originals:
                memo[id(original.state)] = _state(original.state, stand_ins if states else None, memo, mode)
            for original, twin in zip(originals, twins):
                content = {name: value for name, value in vars(original).items() if name not in _LEFT_OUT}
                twin.__dict__.update(copy.deepcopy(content, memo))
                twin.__dict__.update({name: OrderedDict() for name in _HOOKS if name in vars(original)})
    except Exception as error:
        raise TraceError(
            f"The optimizer {type(optimizer).__name__} holds something that cannot be copied ({error}), so that its "
            "states cannot be learnt without touching it: keep that outside of the optimizer."
        ) from error
    copied = {id(p) for p in stand_ins.values()}
    others = {id(p) for p in map(memo.__getitem__, map(id, parameters_of(optimizer)))} - copied
    for twin in twins:
        _forget(vars(twin), others, set())
    for twin in twins:
        for group in twin.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in copied]
        twin.param_groups[:] = [group for group in twin.param_groups if group["params"]]
    for twin in twins:
        train = getattr(twin, "train", None)
        if callable(train):  # as before training steps, whatever the original's mode
            train()
    result: torch.optim.Optimizer = twins[0]
    return result


def _forget(item: Any, others: set[int], seen: set[int]) -> None:
    """Remove what is kept for parameters that have no stand-in."""
    if id(item) in seen or isinstance(item, (torch.Tensor, type, str, bytes)):
        return
    seen.add(id(item))
    if isinstance(item, MutableMapping):
        for key in [key for key in item if isinstance(key, torch.Tensor) and id(key) in others]:
            del item[key]
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else ()
    for part in [*parts, *(dict_of(item) or {}).values()]:
        _forget(part, others, seen)


def _state(
    state: Any, stand_ins: Mapping[int, nn.Parameter] | None, memo: dict[int, Any], mode: FakeTensorMode | None
) -> Any:
    """Copy the states of the parameters with stand-ins, and what belongs to no parameter; empty without stand-ins."""
    found: Any = defaultdict(getattr(state, "default_factory", None) or dict)
    if stand_ins is None or not isinstance(state, Mapping):
        return found
    for key, value in state.items():
        if isinstance(key, torch.Tensor) and id(key) not in stand_ins:
            continue
        for tensor in tensors_in(value) if mode is not None else ():
            if id(tensor) not in memo:
                memo[id(tensor)] = mode.from_tensor(tensor) if mode is not None else tensor
        found[memo[id(key)] if isinstance(key, torch.Tensor) else key] = copy.deepcopy(value, memo)
    return found
