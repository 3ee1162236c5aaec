"""Learns which tensors an optimizer keeps between steps, from a copy that steps stand-ins of the parameters' forms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stowage.stages.ir.errors import TraceError
from stowage.stages.optimizers.content import SOME_TENSOR, Path, leaves_of, named
from stowage.stages.optimizers.quiet import quiet
from stowage.stages.optimizers.single import bare_step
from stowage.stages.optimizers.trial import Habits, rule_settings
from stowage.stages.optimizers.twin import has_states, parameters_of, twin_of


@dataclass(frozen=True)
class StateTensor:
    """A storage that the optimizer keeps.

    Attributes:
        key: its key in the parameter's state, where one tensor has the storage for itself and can be offloaded; else
            "".
        path: the place where it was found first, for people.
        nbytes: the bytes of the storage.
    """

    key: str
    path: str
    nbytes: int


@dataclass(frozen=True)
class KeptStates:
    """All storages that the optimizer keeps.

    Attributes:
        of: a parameter's name -> what is kept for it.
        shared: what belongs to no single parameter.
    """

    of: dict[str, list[StateTensor]]
    shared: list[StateTensor]


@dataclass(frozen=True)
class StateForm:
    """The form of a parameter.

    Attributes:
        shape, stride, dtype: of the tensor, wherever its content is.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> StateForm:
        """Return the form of a tensor that is in memory."""
        return StateForm(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Allocate a tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def kept_states(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    forms: Mapping[str, StateForm],
    habits: Habits,
    device: torch.device,
) -> KeptStates:
    """Return the states that are kept once every parameter has been updated.

    Args:
        optimizer: the user's optimizer, which is never changed.
        parameters: those that are updated, as the optimizer knows them.
        forms: name -> form of each parameter.
        habits: the habits of the optimizer.
        device: the device on which the parameters are updated.

    Raises:
        TraceError: the optimizer cannot be copied, or cannot step.
    """
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    rules = [rule_settings(group, habits.own) for group in optimizer.param_groups]
    for name, parameter in parameters.items():
        alike[rules[groups[id(parameter)]], forms[name]].append(name)
    every = {name: [name] for name in parameters}
    few = {names[0]: names for names in alike.values()}
    # A joint step may keep something for all parameters together. Only fake tensors need no memory for all of them.
    all_or_few = every if habits.joint else few
    tries = [(True, all_or_few, False), (False, few, False)]
    if has_states(optimizer):
        tries = [(True, all_or_few, True), (False, few, True), *tries]
    with quiet():
        problem: Exception
        for fake, chosen, states in tries:
            try:
                mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
                return _learn(
                    optimizer, parameters, forms, chosen, habits.steps, device, mode, states, bool(habits.joint)
                )
            except TraceError as error:
                if not states:
                    raise
                problem = error  # the states may be offloaded, and cannot be copied then
            except Exception as error:  # it reads values of tensors, or needs the states that it has
                problem = error
    raise TraceError(
        f"The states of the optimizer {type(optimizer).__name__} cannot be learnt, because it cannot take a step on "
        f"made-up gradients: {type(problem).__name__}: {str(problem).rstrip('.') or 'no reason given'}."
    ) from problem


def _learn(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    forms: Mapping[str, StateForm],
    chosen: Mapping[str, Sequence[str]],
    steps: int,
    device: torch.device,
    mode: Any,
    states: bool,
    joint: bool,
) -> KeptStates:
    fake = isinstance(mode, FakeTensorMode)
    updated = {id(p) for p in parameters.values()}
    others = [p for p in parameters_of(optimizer) if id(p) not in updated] if joint else []
    with mode:
        stand_ins = {name: nn.Parameter(_made_up(forms[name], device, fake)) for name in chosen}
        idle = {id(p): nn.Parameter(_made_up(StateForm.of(p), device, fake), p.requires_grad) for p in others}
    twin = twin_of(
        optimizer,
        {id(parameters[name]): p for name, p in stand_ins.items()} | idle,
        states=states,
        mode=mode if fake else None,
    )
    with mode:
        for _ in range(steps):
            for name, stand_in in stand_ins.items():
                stand_in.grad = _made_up(forms[name], device, fake)
            bare_step(twin)
            for stand_in in stand_ins.values():
                stand_in.grad = None
    return _Found(twin, stand_ins, list(idle.values())).split(chosen)


def _made_up(form: StateForm, device: torch.device, fake: bool) -> torch.Tensor:
    made = form.empty(device)
    return made if fake else made.normal_()


class _Found:
    """The tensors of a copy after its steps, by storage."""

    def __init__(
        self, twin: torch.optim.Optimizer, stand_ins: Mapping[str, nn.Parameter], idle: Sequence[nn.Parameter]
    ) -> None:
        self._names = list(stand_ins)
        labels = named(stand_ins) | {id(p): f"parameter without a gradient {i}" for i, p in enumerate(idle)}
        found = leaves_of(vars(twin), labels)
        self._tops = {
            id(value): (name, key)
            for name, p in stand_ins.items()
            for key, value in _items(twin.state.get(p))
            if isinstance(value, torch.Tensor)
        }
        own = {_storage(p)[0] for p in [*stand_ins.values(), *idle]}
        self.storages: dict[int, tuple[int, list[tuple[Path, torch.Tensor]]]] = {}
        for path, leaf in found.items():
            if not isinstance(leaf, torch.Tensor):
                continue
            key, nbytes = _storage(leaf)
            if key not in own:
                self.storages.setdefault(key, (nbytes, []))[1].append((path, leaf))

    def split(self, chosen: Mapping[str, Sequence[str]]) -> KeptStates:
        """Assign the storages to parameters; what was learnt from one parameter holds for all like it."""
        marks = {f"<{name}>": name for name in self._names}
        of: dict[str, list[StateTensor]] = {name: [] for name in self._names}
        shared: list[StateTensor] = []
        for nbytes, places in self.storages.values():
            path, tensor = places[0]
            if SOME_TENSOR in path:
                continue  # it belongs to a parameter that another one stands for
            owners = {marks[part] for where, _ in places for part in where if part in marks}
            text = ".".join(part.removeprefix(".") for part in path)
            if len(owners) != 1:
                shared.append(StateTensor("", text, nbytes))
                continue
            owner = owners.pop()
            top = self._tops.get(id(tensor)) if len(places) == 1 else None
            whole = math.prod(tensor.shape) * tensor.element_size() == nbytes
            key = top[1] if top is not None and whole and isinstance(top[1], str) and "::" not in top[1] else ""
            of[owner].append(StateTensor(key, text.partition(f"<{owner}>.")[2] or text, nbytes))
        return KeptStates({name: of[first] for first, names in chosen.items() for name in names}, shared)


def _items(state: Any) -> list[tuple[Any, Any]]:
    return list(state.items()) if isinstance(state, Mapping) else []


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Return identity and bytes of a tensor's storage."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, int(storage.nbytes())
    except (RuntimeError, NotImplementedError):  # tensor subclasses that wrap other tensors
        return id(tensor), tensor.numel() * tensor.element_size()
