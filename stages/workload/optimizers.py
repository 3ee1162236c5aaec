"""Optimizers and learning-rate schedules by name, with their arguments checked before anything is built on them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from stowage.stages.ir.errors import ParameterError

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]

_NOT_PER_TENSOR = {"LBFGS": "it updates all parameters together through a closure"}
_NEED_MORE = {
    "ReduceLROnPlateau": "it needs a validation metric",
    "LambdaLR": "it needs a function, which parameters cannot hold",
    "MultiplicativeLR": "it needs a function, which parameters cannot hold",
    "SequentialLR": "it needs other schedules",
    "ChainedScheduler": "it needs other schedules",
    "SWALR": "it needs an averaged model",
}


def _optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name: found
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
    }


def _schedulers() -> dict[str, type[lr_scheduler.LRScheduler]]:
    return {
        name: found
        for name, found in vars(lr_scheduler).items()
        if isinstance(found, type)
        and issubclass(found, lr_scheduler.LRScheduler)
        and found is not lr_scheduler.LRScheduler
        and not name.startswith("_")
    }


def optimizer_factory(name: str, arguments: Mapping[str, Any] | None = None) -> MakeOptimizer:
    """A function from parameters (or parameter groups) to an optimizer of `torch.optim`.

    Args:
        name: class name, in any case (`AdamW`, `sgd`).
        arguments: its keyword arguments; lists become tuples.

    Raises:
        ParameterError: unknown name, an argument it does not take, or a value it refuses.
    """
    found: type[torch.optim.Optimizer] = _lookup(name, _optimizers(), _NOT_PER_TENSOR, "optimizer")
    keywords = _arguments(found, arguments, {"params"}, "trace.optimizer.arguments")

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        try:
            return found(parameters, **keywords)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ParameterError(f"trace.optimizer {found.__name__} cannot be built: {error}") from error

    make([nn.Parameter(torch.zeros(2, 2))])
    return make


def scheduler_factory(name: str, arguments: Mapping[str, Any] | None = None) -> MakeScheduler:
    """A function from an optimizer to a schedule that is stepped once an iteration.

    Args:
        name: a class of `torch.optim.lr_scheduler`, in any case (`CosineAnnealingLR`), or a schedule of
            `transformers.get_scheduler` (`linear`, `cosine`, `constant_with_warmup`).
        arguments: its keyword arguments (for the latter `num_warmup_steps`, `num_training_steps` and its own).

    Raises:
        ParameterError: unknown name, an argument it does not take, or a value it refuses.
    """
    build, label = _scheduler_builder(name, arguments)

    def make(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        try:
            return build(optimizer)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise ParameterError(f"train.schedule {label} cannot be built: {error}") from error

    make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9))
    return make


def _scheduler_builder(name: str, arguments: Mapping[str, Any] | None) -> tuple[MakeScheduler, str]:
    from transformers import SchedulerType
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler

    key = "train.schedule.arguments"
    if name in {s.value for s in SchedulerType} - {"reduce_lr_on_plateau", "greedy"}:
        keywords = dict(arguments or {})
        specific = set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters) - {"optimizer"}
        known = specific | {"num_warmup_steps", "num_training_steps"}
        _refuse_unknown(keywords, known, name, key)
        common = {k: keywords.pop(k, None) for k in ("num_warmup_steps", "num_training_steps")}
        return (
            lambda optimizer: get_scheduler(name, optimizer, **common, scheduler_specific_kwargs=dict(keywords)),
            name,
        )
    found = _lookup(name, _schedulers(), _NEED_MORE, "schedule")
    keywords = _arguments(found, arguments, {"optimizer"}, key)
    return (lambda optimizer: found(optimizer, **keywords)), found.__name__


def _lookup(name: str, known: Mapping[str, Any], refused: Mapping[str, str], what: str) -> Any:
    parameter = "trace.optimizer.name" if what == "optimizer" else "train.schedule.name"
    by_lower = {k.lower(): k for k in known}
    exact = by_lower.get(name.lower())
    for other, reason in refused.items():
        if name.lower() == other.lower():
            raise ParameterError(f"{parameter} {other} cannot be planned: {reason}; choose another {what}.")
    if exact is None:
        near = difflib.get_close_matches(name.lower(), by_lower, n=1)
        hint = f" (did you mean {by_lower[near[0]]}?)" if near else f"; known are {', '.join(sorted(known))}"
        raise ParameterError(f"{parameter} {name!r} is unknown to torch{hint}.")
    return known[exact]


def _arguments(found: Any, arguments: Mapping[str, Any] | None, own: set[str], key: str) -> dict[str, Any]:
    keywords = {k: tuple(v) if isinstance(v, list) else v for k, v in (arguments or {}).items()}
    known = set(inspect.signature(found.__init__).parameters) - own - {"self"}
    _refuse_unknown(keywords, known, found.__name__, key)
    return keywords


def _refuse_unknown(keywords: Mapping[str, Any], known: set[str], label: str, key: str) -> None:
    for name in keywords:
        if name not in known:
            raise ParameterError(f"{key}.{name} is not an argument of {label}; it takes {', '.join(sorted(known))}.")
