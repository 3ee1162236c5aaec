"""Every call of a program beside the same call on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

Calls = Callable[[Any, Any, Any], Any]
"""Calls an operator with arguments and keywords."""


class RealBesideFake(TorchDispatchMode):
    """While it is entered, real calls run, and each is compared with what `fake` says of it.

    Attributes:
        calls: how many were compared.
        different: calls for which something else came out: strides, bytes of a storage, which argument shares its
            memory.
    """

    def __init__(self, fake: Calls) -> None:
        super().__init__()
        self._fake = fake
        self.calls = 0
        self.different: dict[str, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        known: dict[int, torch.Tensor] = {}

        def fake_of(tensor: torch.Tensor) -> torch.Tensor:
            return known.setdefault(id(tensor), mode.from_tensor(tensor))

        fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, fake_of, (args, kwargs))
        try:
            with mode:
                fake = _forms(self._fake(func, fake_args, fake_kwargs), (fake_args, fake_kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException):  # no call of a plan
            return func(*args, **kwargs)
        text = f"{func}{pytree.tree_map_only(torch.Tensor, _form, (args, kwargs))}"
        result = func(*args, **kwargs)
        real = _forms(result, (args, kwargs))
        self.calls += 1
        if real != fake:
            self.different[text] = real, fake
        return result


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _forms(result: Any, arguments: Any) -> list[Any]:
    given = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    position = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(given)))}
    found: list[Any] = []
    for tensor in pytree.tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            shared = position.get(tensor.untyped_storage()._cdata, -1)
            found.append((*_form(tensor), tensor.untyped_storage().nbytes() if shared < 0 else 0, shared))
    return found
