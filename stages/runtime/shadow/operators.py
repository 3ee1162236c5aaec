"""Knows operators before they run: which memory they write, and how much their results take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from stowage.stages.ir.quiet import quiet_torch
from stowage.stages.kernels import SUBSTITUTES

CUDA_BLOCK_BYTES = 512
"""The caching allocator gives multiples of this many bytes."""


class Facts(NamedTuple):
    """The facts in an operator's schema.

    They are the positions of arguments that it writes, the names of those among the keywords, and whether it only makes
    views of its arguments.
    """

    writes: tuple[int, ...]
    writes_keywords: tuple[str, ...]
    is_view: bool


class Operators:
    """Remembers what is known of operators and of their calls, from one forward to the next."""

    def __init__(self) -> None:
        self._facts: dict[Any, Facts] = {}
        self._sizes: dict[Any, int] = {}
        self._fake: FakeTensorMode | None = None

    def facts(self, func: Any) -> Facts:
        """Return the facts of an operator, from its schema."""
        known = self._facts.get(func)
        if known is None:
            known = self._facts[func] = self._learn(func)
        return known

    @staticmethod
    def _learn(func: Any) -> Facts:
        if not isinstance(func, OpOverload):
            return Facts((), (), False)
        written = [
            (i, a.name, a.kwarg_only)
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        aliases = [r.alias_info for r in func._schema.returns]
        return Facts(
            tuple(i for i, _, keyword in written if not keyword),
            tuple(name for _, name, _ in written),
            not written and bool(aliases) and all(a is not None for a in aliases),
        )

    def new_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        """Return the bytes that a call's outputs will take, from the same call on fake tensors; once for each form."""
        key = func, _form(args), _form(kwargs)
        try:
            return self._sizes[key]
        except KeyError:
            found = self._sizes[key] = self._predict(func, args, kwargs)
            return found
        except TypeError:  # an argument that cannot be hashed
            return self._predict(func, args, kwargs)

    def _predict(self, func: Any, args: Any, kwargs: Any) -> int:
        if self._fake is None:
            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, self._fake.from_tensor, (args, kwargs))
            given = {t.untyped_storage()._cdata for t in leaves((fake_args, fake_kwargs)) if is_strided(t)}
            with quiet_torch(), self._fake:
                result = SUBSTITUTES.get(func, func)(*fake_args, **fake_kwargs)
            made = {t.untyped_storage()._cdata: t.untyped_storage() for t in leaves(result) if is_strided(t)}
        except Exception:  # without a fake kernel, the call's memory is counted once it has run
            return 0
        return sum(taken_bytes(storage) for key, storage in made.items() if key not in given)


def is_strided(item: Any) -> bool:
    """Return whether an item is a tensor with one storage and strides."""
    return isinstance(item, torch.Tensor) and item.layout is torch.strided and not item.is_nested


def taken_bytes(storage: torch.UntypedStorage) -> int:
    """Return the bytes that the allocator takes for a storage."""
    nbytes = storage.nbytes()
    return -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES if storage.device.type == "cuda" else nbytes


def leaves(item: Any) -> Iterable[Any]:
    """Yield the entries of what operators take and return: nested lists, tuples and dictionaries."""
    if isinstance(item, (list, tuple)):
        for part in item:
            yield from leaves(part)
    elif isinstance(item, dict):
        for part in item.values():
            yield from leaves(part)
    else:
        yield item


def _form(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return (item.shape, item.stride(), item.dtype, item.device) if item.layout is torch.strided else item.shape
    if isinstance(item, (list, tuple)):
        return tuple(map(_form, item))
    if isinstance(item, dict):
        return tuple((name, _form(part)) for name, part in item.items())
    return type(item), item
