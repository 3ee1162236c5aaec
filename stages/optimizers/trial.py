"""Tries on copies with a few small tensors whether an optimizer updates each tensor by itself."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import TraceError
from stowage.stages.optimizers.content import Path, leaves_of, named, same_leaf, snapshot
from stowage.stages.optimizers.quiet import SEED, drawn, global_hooks, quiet
from stowage.stages.optimizers.single import bare_step, own_step, step_alone
from stowage.stages.optimizers.twin import has_states, inner_optimizers, twin_of

NOT_STRUCTURE = frozenset({"lr", "initial_lr", "params", "param_names"})
"""Settings that change neither the states nor the cost of an update, unless the rate is a tensor."""

SCALES = (1.0, 1e-4, 1e4, 1.0, 1e2, 1.0, 1e-2, 1.0)
"""The scale of the gradients of each step: norms less and greater than any limit that an optimizer may have."""

ABSENT = 3
"""The step in which one gradient is missing."""

ALIKE = 2
"""The number of stand-ins of each form in a group, and of groups of each kind."""

LARGEST = {1: 64, 2: 24}
"""Number of dimensions -> the longest side of a stand-in; `MORE` with more dimensions."""

MORE = 6


@dataclass(frozen=True)
class Habits:
    """Behaviour of an optimizer, as observed in trial steps.

    Attributes:
        joint: why all parameters must be updated in one step; "" where each can be updated by itself, with equal bits.
        own: entries of its groups that it changes itself, such as counters; they are not settings of the user's.
        steps: the number of steps after which no new state appears.
    """

    joint: str
    own: frozenset[str]
    steps: int


def rule_settings(group: Mapping[str, Any], own: frozenset[str]) -> str:
    """Return what steers the update in a parameter group, as JSON that is the same in every process."""
    settings = {k: v for k, v in group.items() if k not in own and (k not in NOT_STRUCTURE or tensor_rate(k, v))}
    return json.dumps(settings, sort_keys=True, default=described)


def tensor_rate(key: str, value: Any) -> bool:
    """Say whether this entry of a group is a learning rate in a tensor: what is computed from it takes memory too."""
    return key == "lr" and isinstance(value, torch.Tensor)


def described(item: Any) -> str:
    """Return a setting as text, without addresses; of a tensor its form."""
    if isinstance(item, torch.Tensor):
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(item))


def habits_of(optimizer: torch.optim.Optimizer) -> Habits:
    """Compare a joint step with single ones bit for bit, over several steps, on parameters, states and groups.

    The single steps come in the reverse order, as a backward pass brings the gradients.

    Raises:
        TraceError: the optimizer cannot be copied, or cannot step.
    """
    hooked = _hooked(optimizer)
    with quiet():
        chosen = chosen_parameters(optimizer)
        fresh = ((False, False), (True, False))
        usable = has_states(optimizer) and not any(_has_states_of_a_shard(optimizer, p) for _, p in chosen)
        for real, states in ((True, True), *fresh) if usable else fresh:
            try:
                together = _Run(optimizer, chosen, real=real, states=states)
                together.joint()
            except TraceError:
                raise
            except Exception as error:  # e.g. tensors too small, or missing states
                problem = error
                continue
            joint = hooked or ("" if together.quiet else "it draws random numbers")
            if not joint:
                apart = _Run(optimizer, chosen, real=real, states=states)
                joint = _difference(together, apart)
                if joint:  # entries that only change after many gradients
                    together.own |= _changed(together.groups(), apart.groups())
            return Habits(joint, together.own, together.steps)
    raise TraceError(
        f"The optimizer {type(optimizer).__name__} cannot take a step on made-up gradients, which tells what it needs: "
        f"{type(problem).__name__}: {str(problem).rstrip('.') or 'no reason given'}."
    ) from problem


def _hooked(optimizer: torch.optim.Optimizer) -> str:
    """Return why `step` must be called once for all parameters, whatever its arithmetic; "" for no reason."""
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")) or global_hooks():
        return "it has step hooks"
    return "its `step` has been replaced" if any(own_step(o) for o in inner_optimizers(optimizer)) else ""


def _difference(together: _Run, apart: _Run) -> str:
    try:
        apart.single()
    except Exception:
        return "it cannot step for one parameter alone"
    for one, other in zip(together.found, apart.found, strict=True):
        if one.keys() != other.keys():
            return "its states depend on which parameters step"
        for path in one:
            if not same_leaf(one[path], other[path]):
                return f"{'.'.join(p.removeprefix('.') for p in path)} depends on all parameters"
    return ""


def chosen_parameters(
    optimizer: torch.optim.Optimizer, also: Callable[[torch.Tensor], Hashable] | None = None
) -> list[tuple[int, torch.Tensor]]:
    """Choose a few parameters with the positions of their groups: two of each form, in two groups of each kind.

    Forms differ in number of dimensions, type and device, and in what `also` returns.
    """
    kinds: dict[str, int] = defaultdict(int)
    found: list[tuple[int, torch.Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        trained = [p for p in group["params"] if p.requires_grad]
        if not trained:
            continue
        kind = ",".join(f"{k}={_kind_of(v)}" for k, v in sorted(group.items()) if k not in NOT_STRUCTURE)
        kinds[kind] += 1
        if kinds[kind] > ALIKE:
            continue
        forms: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        for parameter in sorted(trained, key=lambda p: p.numel()):
            more = also(parameter) if also is not None else None
            forms[parameter.ndim, parameter.dtype, parameter.device, more].append(parameter)
        found += [(index, p) for alike in forms.values() for p in alike[:ALIKE]]
    if not found:
        raise TraceError(f"The optimizer {type(optimizer).__name__} holds no parameter that requires a gradient.")
    return found


def real_device(parameter: torch.Tensor) -> torch.device:
    """Return where a stand-in has content: the CPU for a parameter that has none yet, on the meta device."""
    return torch.device("cpu") if parameter.is_meta else parameter.device


def _has_states_of_a_shard(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Say whether a parameter stands for a shard that is elsewhere, of which its states are: they fit nothing here."""
    if parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.element_size():
        return False
    states = [s for s in optimizer.state.get(parameter, {}).values() if isinstance(s, torch.Tensor)]
    return any(s.ndim == parameter.ndim and s.shape != parameter.shape for s in states)


def _kind_of(value: Any) -> str:
    return type(value).__name__ if isinstance(value, (int, float)) and not isinstance(value, bool) else described(value)


class _Run:
    """The steps of one copy."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, chosen: list[tuple[int, torch.Tensor]], *, real: bool, states: bool
    ) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.parameters: list[nn.Parameter] = []
        for _, parameter in chosen:
            shape = tuple(parameter.shape) if real else small(tuple(parameter.shape))
            content = torch.randn(shape, generator=generator, device="cpu").to(real_device(parameter), parameter.dtype)
            self.parameters.append(nn.Parameter(content))
        of = {id(p): stand_in for (_, p), stand_in in zip(chosen, self.parameters)}
        self.optimizer = twin_of(optimizer, of, states=states)
        self.names = named({f"parameter {i}": p for i, p in enumerate(self.parameters)})
        self._generator = generator
        self.own: frozenset[str] = frozenset()
        self.steps = 1
        self.quiet = True
        self.found: list[dict[Path, Any]] = []

    def _gradients(self, step: int) -> list[torch.Tensor | None]:
        made: list[torch.Tensor | None] = [
            (torch.randn(p.shape, generator=self._generator, device="cpu") * SCALES[step]).to(p.device, p.dtype)
            for p in self.parameters
        ]
        if step == ABSENT:
            made[-1] = None
        return made

    def _spoiled(self) -> list[torch.Tensor | None]:
        """Return gradients of which one is not finite."""
        made = self._gradients(0)
        if made[0] is not None:
            made[0].fill_(float("nan"))
        return made

    def _step_together(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        bare_step(self.optimizer)
        for parameter in self.parameters:
            parameter.grad = None

    def _step_apart(self, gradients: list[torch.Tensor | None]) -> None:
        """Step for each parameter by itself, the last one first."""
        groups = self.optimizer.param_groups
        index = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        for parameter, gradient in reversed(list(zip(self.parameters, gradients))):
            if gradient is not None:
                step_alone(self.optimizer, index[id(parameter)], parameter, gradient, bare_step)

    def joint(self) -> None:
        """Take all steps, each for all parameters."""
        before, groups = drawn(), self.groups()
        known = self._states()
        for step in range(len(SCALES)):
            self._step_together(self._gradients(step))
            now = self._states()
            if now - known:
                self.steps = step + 1
            known |= now
        self.quiet = drawn() == before
        self._note()
        self.own = _changed(groups, self.groups())
        self._spoil(self._step_together)
        self.own |= self._turned()

    def single(self) -> None:
        """Take all steps, each parameter by itself."""
        for step in range(len(SCALES)):
            self._step_apart(self._gradients(step))
        self._note()
        self._spoil(self._step_apart)

    def _spoil(self, step: Callable[[list[torch.Tensor | None]], None]) -> None:
        """Take a step with one gradient that is not finite: an optimizer may then treat all parameters differently."""
        try:
            step(self._spoiled())
        except Exception:  # a decomposition, say, that does not converge
            self.found.append({("not finite",): "refused"})
        else:
            self._note()

    def _note(self) -> None:
        """Record parameters, states, groups and attributes as they are now."""
        content = leaves_of(vars(self.optimizer), self.names)
        content |= {(name,): p.detach() for name, p in zip(self.names.values(), self.parameters)}
        self.found.append(snapshot(content))

    def _states(self) -> set[Path]:
        return {p for p, leaf in leaves_of(vars(self.optimizer), self.names).items() if isinstance(leaf, torch.Tensor)}

    def groups(self) -> list[dict[Path, Any]]:
        """Return the content of each group."""
        return [snapshot(leaves_of(group, self.names)) for group in self.optimizer.param_groups]

    def _turned(self) -> frozenset[str]:
        """Return the entries of groups that say whether the optimizer is in training mode."""
        turn = getattr(self.optimizer, "eval", None)
        if not callable(turn):
            return frozenset()
        before = self.groups()
        turn()
        return _changed(before, self.groups())


def _changed(before: list[dict[Path, Any]], after: list[dict[Path, Any]]) -> frozenset[str]:
    return frozenset(
        path[0]
        for old, new in zip(before, after)
        for path in old.keys() | new.keys()
        if path[0] != "params" and (path not in old or path not in new or not same_leaf(old[path], new[path]))
    )


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape of as many dimensions, with short sides."""
    longest = LARGEST.get(len(shape), MORE)
    return tuple(min(n, longest) for n in shape)
