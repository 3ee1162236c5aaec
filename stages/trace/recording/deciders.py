"""Finds the parameters that decide whether a tensor requires gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MOST = 200
"""The most functions of autograd between a tensor and its parameters; what is farther away is an activation."""

Deciders = tuple[torch.Tensor, ...]


def deciders_of(tensor: torch.Tensor) -> Deciders:
    """Return the leaves that a tensor which requires gradients is made of; none where they are too many to look for."""
    if tensor.is_leaf:
        return (tensor,) if tensor.requires_grad else ()
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    left: list[Any] = [tensor.grad_fn]
    while left:
        function = left.pop()
        if function is None or function in seen:
            continue
        if len(seen) == MOST:
            return ()
        seen.add(function)
        if hasattr(function, "variable"):
            found[id(function.variable)] = function.variable
        left.extend(before for before, _ in reversed(function.next_functions))
    return tuple(found.values())


class Taken:
    """Remembers which calls are replaced, and what decides in each, for another forward in which less trains."""

    def __init__(self) -> None:
        self._deciders: list[Deciders] = []
        self._again: int | None = None

    def again(self) -> Taken:
        """Return what another forward of the same model goes by."""
        other = Taken()
        other._deciders, other._again = self._deciders, 0
        return other

    def next(self, find: Callable[[], Deciders]) -> Deciders:
        """Return what decides in the next call; none where it is not replaced."""
        if self._again is None:
            self._deciders.append(find())
            return self._deciders[-1]
        self._again += 1
        return self._deciders[self._again - 1] if self._again <= len(self._deciders) else ()
