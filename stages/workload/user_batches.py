"""Gets batches from a function of the user's (`train.data.callable`), for any model and any data.

The function is of one of two kinds, told apart by its parameters:

- `function(seed, iteration)` returns the batch of one iteration, the same one whenever it is asked: training resumes
  without a replay.
- `function(seed)` or `function()` returns an iterable of batches, such as a `DataLoader`. It is iterated again when it
  ends. Training that resumes draws again, and drops, the batches of the iterations that are done.

Both draw from generators that are seeded for them, and leave those of the training loop alone.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from stowage.stages.ir.errors import ParameterError
from stowage.stages.workload.guard import user_code
from stowage.stages.workload.models import resolve
from stowage.stages.workload.randomness import generator, seeded

Batch = dict[str, Any]
_KEY = "train.data.callable"


class UserBatches:
    """Maps an iteration to its batch, checked against the batch that the step was traced with.

    Args:
        path: `package.module:function`.
        seed: the seed for the function and for the generators that it draws from.
        sample: the batch of the trace.
        device: the device for the batches.

    Raises:
        ParameterError: there is no such function, it takes other parameters, or it gives two different batches for the
            same seed.
    """

    def __init__(self, path: str, seed: int, sample: Mapping[str, Any], device: torch.device) -> None:
        self._what = f"{_KEY} {path!r}"
        self._sample = sample
        self._device = device
        function = resolve(path, _KEY)
        parameters = _parameters_of(function, self._what)
        kind: type[_Function] | type[_Stream] = _Function if "iteration" in parameters else _Stream
        make = functools.partial(kind, function, parameters, seed, self._what)
        self._batches = make()
        if not _equal(make()(0), make()(0)):
            raise ParameterError(
                f"{self._what} gives two different batches for the same seed: draw from a generator that is made from "
                "the seed it is given, so that training can resume and be compared."
            )

    def __call__(self, iteration: int) -> Batch:
        """Return the batch of an iteration, on the device.

        Raises:
            ParameterError: it has another form than the one that the step was traced with.
        """
        made = self._batches(iteration)
        batch = _checked(made, self._sample, f"{self._what}, iteration {iteration}:")
        return {k: v.to(self._device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


class _Function:
    """Gets batches from a function of seed and iteration."""

    def __init__(self, function: Any, parameters: set[str], seed: int, what: str) -> None:
        self._function, self._seed, self._what = function, seed, what
        self._given = {"seed": seed} if "seed" in parameters else {}

    def __call__(self, iteration: int) -> Any:
        with seeded(_number(self._seed, iteration)), user_code(self._what):
            return self._function(iteration=iteration, **self._given)


class _Stream:
    """Gets batches from an iterable; when asked for an earlier iteration than the next one, it begins again."""

    def __init__(self, function: Any, parameters: set[str], seed: int, what: str) -> None:
        self._function, self._seed, self._what = function, seed, what
        self._given = {"seed": seed} if "seed" in parameters else {}
        self._next = -1
        self._drawn = _Generators(seed)
        self._iterable: Any = None
        self._iterator: Iterator[Any] = iter(())

    def __call__(self, iteration: int) -> Any:
        if self._next < 0 or iteration < self._next:
            self._begin()
        while True:
            batch = self._draw()
            self._next += 1
            if self._next > iteration:
                return batch

    def _begin(self) -> None:
        self._drawn = _Generators(self._seed)
        with self._drawn.in_use(), user_code(self._what):
            made = self._function(**self._given)
            several = hasattr(made, "__iter__") and not isinstance(made, str | Mapping)
            self._iterator = iter(made) if several else iter(())
        if not several:
            raise ParameterError(
                f"{self._what} must return an iterable of batches, or take `iteration` and return one batch, and "
                f"returns {type(made).__name__}."
            )
        self._iterable = made
        self._next = 0

    def _draw(self) -> Any:
        with self._drawn.in_use(), user_code(self._what):
            for batch in self._iterator:
                return batch
            self._iterator = iter(self._iterable)
            for batch in self._iterator:
                return batch
        raise ParameterError(
            f"{self._what} ends after {self._next} batches and cannot be iterated again: return a list or a "
            "DataLoader, or make a generator endless, or lower train.steps."
        )


class _Generators:
    """The states of torch's, NumPy's and Python's generators that belong to one stream of batches."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        with seeded(_number(seed)):
            self._states = self._read()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw on from these states inside the block; restore the global ones afterwards."""
        with seeded(_number(self._seed)):
            torch.set_rng_state(self._states[0])
            np.random.set_state(self._states[1])
            random.setstate(self._states[2])
            yield
            self._states = self._read()

    @staticmethod
    def _read() -> tuple[torch.Tensor, Any, Any]:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _number(*numbers: int) -> int:
    return generator(*numbers).initial_seed()


def _parameters_of(function: Any, what: str) -> set[str]:
    """Return which of `seed` and `iteration` a function takes.

    Raises:
        ParameterError: it needs something else.
    """
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"{what} has no parameters that can be read: write a function of (seed, iteration)."
        ) from error
    known = {"seed", "iteration"}
    needed = [
        p.name
        for p in found
        if p.name not in known and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    wrong = needed or [p.name for p in found if p.name in known and p.kind is p.POSITIONAL_ONLY]
    if wrong:
        raise ParameterError(
            f"{what} takes {', '.join(wrong)}: it must take `seed` and `iteration` and return a batch, or `seed` or "
            "nothing and return an iterable of batches."
        )
    return {p.name for p in found} & known


def _checked(made: Any, sample: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Return the batch if it has the form of the sample; else raise."""
    if not isinstance(made, Mapping):
        raise ParameterError(
            f"{what} a batch must be a dictionary of keyword arguments of the model, and is {type(made).__name__}."
        )
    if made.keys() != sample.keys():
        raise ParameterError(
            f"{what} the batch has {_names(made)}, and the step was traced with {_names(sample)}: make it the same."
        )
    expected, found = _leaves(sample), _leaves(made)
    if expected.keys() != found.keys():
        other = sorted(expected.keys() ^ found.keys())[0]
        raise ParameterError(f"{what} the batch differs from the one that the step was traced with at {other}.")
    for path, old in expected.items():
        if (was := _form(old)) != (now := _form(found[path])):
            raise ParameterError(f"{what} {path} is {now}, and the step was traced with {was}: make it the same.")
    return made


def _leaves(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(dict(batch))[0]}


def _form(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape)}"


def _names(batch: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, batch))) or "nothing"


def _equal(one: Any, other: Any) -> bool:
    first, second = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(first) == len(second) and all(map(_same, first, second))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _form(one) == _form(other) and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other)
