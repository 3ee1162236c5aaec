"""Takes the properties of an optimizer that a plan depends on: which parameter is in which group, under which rules.

It is fast, because it is taken at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from stowage.stages.optimizers.single import own_step
from stowage.stages.optimizers.trial import NOT_STRUCTURE, tensor_rate

_FREE = frozenset((int, float))


class GroupSignature(NamedTuple):
    """A parameter group: identities of its members, and its settings.

    Numbers may change from step to step; they count only by whether they are zero.
    """

    members: tuple[int, ...]
    settings: tuple[tuple[str, Any], ...]


class OptimizerSignature(NamedTuple):
    """An optimizer's class, groups, number of step hooks, and whether its `step` has been replaced on the object.

    `resting` has the parameters that it has states of though they require no gradients: these states take memory too.
    """

    kind: str
    groups: tuple[GroupSignature, ...]
    hooks: int
    replaced: bool
    resting: frozenset[int]

    def differences(self, other: OptimizerSignature, names: Mapping[int, str]) -> list[str]:
        """List how `other` (the optimizer now) departs from this one (when it was planned); empty when equal."""
        if self == other:
            return []
        found: list[str] = []
        if self.kind != other.kind:
            found.append(f"the optimizer is a {other.kind}; the step was planned with a {self.kind}.")
        if len(self.groups) != len(other.groups):
            found.append(f"the optimizer has {len(other.groups)} groups; the step was planned with {len(self.groups)}.")
        if self.hooks != other.hooks:
            found.append(f"the optimizer has {other.hooks} step hooks; the step was planned with {self.hooks}.")
        for member in self.resting ^ other.resting:
            name = names.get(member, "a parameter outside of the model")
            found.append(
                f"{name} requires no gradient, and its states are {'gone' if member in self.resting else 'new'}."
            )
        before, now = ({m: i for i, g in enumerate(s.groups) for m in g.members} for s in (self, other))
        for member in before.keys() | now.keys():
            if before.get(member) != now.get(member):
                name = names.get(member, "a parameter outside of the model")
                was, is_now = (f"in group {s[member]}" if member in s else "in none" for s in (before, now))
                found.append(f"{name} is {is_now} of the optimizer; the step was planned with it {was}.")
        for number, (old, new) in enumerate(zip(self.groups, other.groups)):
            was_set, now_set = dict(old.settings), dict(new.settings)
            found += [
                f"{key} of group {number} of the optimizer is another kind of value now."
                for key in was_set.keys() | now_set.keys()
                if was_set.get(key) != now_set.get(key)
            ]
        return sorted(found) or ["the optimizer's groups are in another order."]


def signature_of(optimizer: torch.optim.Optimizer, own: frozenset[str] = frozenset()) -> OptimizerSignature:
    """Return the signature of an optimizer, in microseconds for each group.

    Args:
        optimizer: any optimizer.
        own: entries of groups that the optimizer changes itself, which are ignored.
    """
    groups = []
    left_out = NOT_STRUCTURE | own
    for group in optimizer.param_groups:
        members = tuple(map(id, group["params"]))
        settings = tuple([(k, _kind(v)) for k, v in group.items() if k not in left_out or tensor_rate(k, v)])
        groups.append(GroupSignature(members, settings))
    hooks = 0
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks += len(vars(optimizer).get(name, ()))
    return OptimizerSignature(
        type(optimizer).__qualname__, tuple(groups), hooks, own_step(optimizer), _resting(optimizer)
    )


def _resting(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    # It goes through the states, since looking them up by parameter takes many times longer.
    return frozenset([id(p) for p in optimizer.state if isinstance(p, torch.Tensor) and not p.requires_grad])


def _kind(value: Any) -> Any:
    kind = type(value)
    if kind in _FREE:
        return kind.__name__, value == 0
    if kind in (bool, str, type(None)):
        return value
    if kind in (tuple, list):
        return tuple(map(_kind, value))
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype
    return kind.__qualname__
