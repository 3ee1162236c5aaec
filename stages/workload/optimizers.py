"""Builds optimizers and learning-rate schedules by name, and checks their arguments before anything depends on them."""

from __future__ import annotations

import copy
import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import lr_scheduler

from stowage.stages.ir.errors import ParameterError

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]

_REFUSALS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
"""Errors that classes raise for arguments that they do not accept."""
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
    """Return a function from parameters (or parameter groups) to an optimizer of `torch.optim`.

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
        except _REFUSALS as error:
            raise ParameterError(f"trace.optimizer {found.__name__} cannot be built: {error}") from error

    _try_optimizer(make, found.__name__)
    return make


def _try_optimizer(make: MakeOptimizer, label: str) -> None:
    """Take two steps on one weight to see whether the optimizer raises; the numbers do not matter."""
    parameters = [nn.Parameter(torch.zeros(2, 2, device="cpu"))]
    optimizer = make(parameters)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
    except Exception as error:
        if type(error) is RuntimeError and "sparse" in str(error).lower():
            return  # tracing sees whether the model's gradients are sparse
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ParameterError(
            f"trace.optimizer {label} cannot step with these arguments ({reason}): correct them."
        ) from error


def scheduler_factory(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    like: torch.optim.Optimizer | None = None,
    steps: int = 0,
) -> MakeScheduler:
    """Return a function from an optimizer to a schedule that is stepped once an iteration.

    Args:
        name: a class of `torch.optim.lr_scheduler`, in any case (`CosineAnnealingLR`), or a schedule of
            `transformers.get_scheduler` (`linear`, `cosine`, `constant_with_warmup`).
        arguments: its keyword arguments (for the latter `num_warmup_steps`, `num_training_steps` and its own).
        like: the optimizer that it is for, which is not changed.
        steps: the number of training steps.

    Raises:
        ParameterError: unknown name, an argument it does not take, a value it refuses, or it ends before training does.
    """
    build, label = _scheduler_builder(name, arguments)

    def make(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        try:
            return build(optimizer)
        except _REFUSALS as error:
            raise ParameterError(f"train.schedule {label} cannot be built: {error}") from error

    _try(make, label, like, steps)
    return make


def _try(make: MakeScheduler, label: str, like: torch.optim.Optimizer | None, steps: int) -> None:
    """Take all steps of a schedule on an optimizer with the same settings and made-up parameters."""
    if like is None:
        hollow: torch.optim.Optimizer = torch.optim.SGD(
            [nn.Parameter(torch.zeros(1, device="cpu"))], lr=0.1, momentum=0.9
        )
    else:
        groups = [
            {**group, "params": [nn.Parameter(torch.zeros(1, device="cpu"))]}
            for group in copy.deepcopy(_settings(like))
        ]
        hollow = cast(Any, type(like))(groups)
    schedule = make(hollow)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that the optimizer has not stepped
        for step in range(steps):
            try:
                schedule.step()
            except _REFUSALS as error:
                raise ParameterError(
                    f"train.schedule {label} fails at step {step + 1} of train.steps {steps} ({error}): correct its "
                    "arguments."
                ) from error
            if not all(_is_rate(group["lr"]) for group in hollow.param_groups):
                raise ParameterError(
                    f"train.schedule {label} sets a learning rate of {hollow.param_groups[0]['lr']} at step {step + 1} "
                    f"of train.steps {steps}: correct its arguments."
                )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _is_rate(rate: Any) -> bool:
    return not isinstance(rate, complex) and math.isfinite(rate)


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
