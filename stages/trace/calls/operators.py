"""States facts about ATen operators that their schemas do not tell."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

aten = torch.ops.aten

ALIASES = {aten.detach.default, aten.alias.default}
"""Operators that return their input under another name; the trace drops them."""

_BATCH_NORM_STATISTICS: dict[OpOverload, tuple[int, int, int]] = {
    aten.native_batch_norm.default: (3, 4, 5),
    aten.cudnn_batch_norm.default: (3, 4, 5),
    aten.miopen_batch_norm.default: (3, 4, 5),
}
"""Operator -> positions of running mean, running variance and the training flag."""

_LIKE = {
    aten.empty_like.default: "empty",
    aten.zeros_like.default: "zeros",
    aten.ones_like.default: "ones",
    aten.new_empty.default: "empty",
    aten.new_zeros.default: "zeros",
    aten.new_ones.default: "ones",
}


def true_outputs(target: OpOverload, arguments: list[Any], *, gradients: bool = True) -> list[torch.Tensor]:
    """Run an opaque operator on zeros shaped like `arguments`, to learn the sizes of its outputs."""
    with unset_fake_temporarily(), torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=[]):
        real = [
            torch.zeros(tuple(a.shape), dtype=a.dtype, device=a.device) if isinstance(a, torch.Tensor) else a
            for a in arguments
        ]
        return list(target(*real))


def mutated_arguments(target: OpOverload, arguments: list[Any]) -> list[int]:
    """Return positions of arguments that the operator writes in place.

    Batch normalisation in training mode writes its running statistics although its schema does not say so.
    """
    found = [
        i
        for i, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    statistics = _BATCH_NORM_STATISTICS.get(target)
    if statistics and arguments[statistics[2]]:
        found += [i for i in statistics[:2] if arguments[i] is not None]
    return found


def written_keywords(target: OpOverload) -> list[str]:
    """Return the names of arguments that are given by name alone and written in place."""
    return [
        a.name for a in target._schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
    ]


def writes(target: OpOverload) -> bool:
    """Say whether an operator's schema says that it writes to any of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments)


def replay_arguments(target: OpOverload, arguments: list[Any]) -> list[Any] | None:
    """Return arguments for a second execution, or None if they are the same: batch statistics are only updated once."""
    statistics = _BATCH_NORM_STATISTICS.get(target)
    if not statistics or not arguments[statistics[2]] or arguments[statistics[0]] is None:
        return None
    return [None if i in statistics[:2] else argument for i, argument in enumerate(arguments)]


def is_random(target: OpOverload) -> bool:
    """Say whether the operator draws from the global generator."""
    return torch.Tag.nondeterministic_seeded in target.tags and target != aten._cudnn_rnn.default


def draws_by_itself(target: OpOverload, arguments: Sequence[Any], generators: Sequence[torch.Generator]) -> bool:
    """Say whether a call draws from a random state that nothing can restore.

    Such a call is cuDNN's recurrent layer with dropout, whose state is no generator's, or PyTorch's seeding of that
    state, which has a GPU's own generator among its arguments.
    """
    if target == aten.random_.default:
        return not {*map(_CDATA, torch.cuda.default_generators)}.isdisjoint(map(_CDATA, generators))
    return target == aten._cudnn_rnn.default and bool(arguments[_TRAIN] and arguments[_DROPOUT] > 0)


_CDATA = attrgetter("_cdata")
"""The identity of a generator: PyTorch wraps the same one anew for each call."""

_DROPOUT, _TRAIN = 11, 12
"""Positions of these arguments in `_cudnn_rnn`."""


def fresh_factory(target: OpOverload, output: torch.Tensor) -> tuple[OpOverload, list[Any], dict[str, Any]] | None:
    """Return a factory call to replace one that reads only its input's shape (`empty_like`), or None.

    Without this a dropout mask would keep its input in memory. It is done only for results that are contiguous, or
    uninitialised.
    """
    kind = _LIKE.get(target)
    if kind is None:
        return None
    options = {"dtype": output.dtype, "device": output.device}
    shape = list(output.shape)
    if kind == "empty":
        return aten.empty_strided.default, [shape, list(output.stride())], options
    if not output.is_contiguous():
        return None
    return (aten.zeros if kind == "zeros" else aten.ones).default, [shape], options
