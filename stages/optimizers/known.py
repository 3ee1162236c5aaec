"""Keeps what has been learnt about one optimizer until its groups change."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path

import torch

from stowage.stages.ir.updates import UpdateRule
from stowage.stages.optimizers.signature import OptimizerSignature, signature_of
from stowage.stages.optimizers.states import KeptStates, StateForm, kept_states
from stowage.stages.optimizers.trial import Habits, habits_of, rule_settings
from stowage.stages.optimizers.twin import inner_optimizers


class KnownOptimizer:
    """Learns about an optimizer when asked, and again only when its groups have changed.

    Attributes:
        optimizer: the user's optimizer, which is never stepped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._own: frozenset[str] = frozenset()
        self._habits: tuple[OptimizerSignature, Habits] | None = None
        self._kept: tuple[object, KeptStates] | None = None

    def signature(self) -> OptimizerSignature:
        """Return the properties that plans depend on; fast once something has been learnt."""
        return signature_of(self.optimizer, self._own)

    @property
    def habits(self) -> Habits:
        """Return what the optimizer does, such as whether each tensor is updated by itself."""
        if self._habits is None or self._habits[0] != self.signature():
            habits = habits_of(self.optimizer)
            self._own = habits.own
            self._habits = self.signature(), habits
        return self._habits[1]

    def kept(
        self, parameters: Mapping[str, torch.Tensor], forms: Mapping[str, StateForm], device: torch.device
    ) -> KeptStates:
        """Return the states of those parameters; see `kept_states`."""
        habits = self.habits
        key = self.signature(), tuple((name, id(p), forms[name]) for name, p in parameters.items()), device
        if self._kept is None or self._kept[0] != key:
            self._kept = key, kept_states(self.optimizer, parameters, forms, habits, device)
        return self._kept[1]

    def rules(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, UpdateRule]:
        """Return name -> update rule, for those of the parameters that the optimizer holds."""
        kind = class_name(self.optimizer)
        names: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), []).append(name)
        found: dict[str, UpdateRule] = {}
        for group in self.optimizer.param_groups:
            rule = UpdateRule(kind, rule_settings(group, self.habits.own))
            found.update({name: rule for p in group["params"] for name in names.get(id(p), ())})
        return found

    def has_states_of(self, parameter: torch.Tensor) -> bool:
        """Say whether the optimizer keeps anything for this parameter yet."""
        return any(bool(o.state.get(parameter)) for o in inner_optimizers(self.optimizer))

    def code(self) -> str:
        """Return a hash of the source of classes that are not PyTorch's own: when it changes, so may the cost."""
        files = {inspect.getfile(kind) for o in inner_optimizers(self.optimizer) for kind in _bases(type(o))}
        content = [Path(file).read_bytes() for file in sorted(files) if Path(file).is_file()]
        return f"#{hashlib.sha256(b''.join(content)).hexdigest()[:8]}" if content else ""


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the classes of the optimizer and of those that it wraps, as `module:name`."""
    return "+".join(f"{type(o).__module__}:{type(o).__qualname__}" for o in inner_optimizers(optimizer))


def _bases(kind: type) -> list[type]:
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins", "typing")]
    return [base for base in own if _has_file(base)]


def _has_file(kind: type) -> bool:
    try:
        return bool(inspect.getfile(kind))
    except (OSError, TypeError):
        return False
