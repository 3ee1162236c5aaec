"""Tensors whose content is offloaded: shape and identity are known, and reading numbers raises an error.

Stand-ins read as NaN. So that nobody trains with these, the objects that the user has are of a class of their own
until their content is reloaded, as PyTorch does it with uninitialized parameters; then they get their class back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch

from stowage.stages.ir.errors import OffloadedError
from stowage.stages.ir.updates import is_gradient_slot

_FORM = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device",
    "untyped_storage", "data_ptr", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
    "retain_grad", "__hash__", "can_cast", "result_type", "empty_like", "zeros_like", "ones_like", "full_like",
    "rand_like", "randn_like", "randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
))  # fmt: skip
"""Functions that look at shape, strides and dtype alone."""

_ASKS = ("is_", "_is_", "has_")
"""Prefixes of functions that ask for such properties; `is_nonzero` is the one that reads numbers."""

_NUMBERS = frozenset(("T", "H", "mT", "mH", "real", "imag"))
"""Properties that give access to numbers."""

_MOVES = frozenset(("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"))
"""Functions that return the tensor itself if it is already as asked for."""

_SAME = frozenset(("detach", "data"))
"""Functions that return another object with the same memory."""


OFFLOADED = "offloaded"
"""Where a tensor's numbers are, as errors say it, unless someone else has them."""


class OffloadedTensor(torch.Tensor):
    """A tensor whose content is in the lower tier.

    Attributes:
        slot_name: the name of its slot.
        whereabouts: where its numbers are instead, for errors.
        here: the class that it has while its content is on the device.
    """

    slot_name: str
    whereabouts: str
    here: ClassVar[type[torch.Tensor]] = torch.Tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run functions that need no numbers, as for every tensor.

        Raises:
            OffloadedError: numbers are read or written.
        """
        kind = getattr(func, "__name__", "")
        is_property = kind in ("__get__", "__set__")
        name = str(func.__self__.__name__) if is_property else kind  # type: ignore[attr-defined]
        here = args[0] if args and isinstance(args[0], OffloadedTensor) else None
        if name == "__repr__" and here is not None:
            return f"{here.here.__name__}(offloaded, shape={tuple(here.shape)}, dtype={here.dtype})"
        if name == "data" and kind == "__set__" and not isinstance(args[1], OffloadedTensor):
            raise offloaded(_first(args, kwargs), "data")
        if not (_asks_for_form(name, is_property) or name in _SAME or name in _MOVES):
            raise offloaded(_first(args, kwargs), name)
        found = torch._C._disabled_torch_function_impl(func, types, args, dict(kwargs or {}))
        if name in _MOVES and isinstance(found, torch.Tensor) and found is not here:
            raise offloaded(_first(args, kwargs), name)
        if name in _SAME and kind != "__set__" and here is not None:
            leave(found, here.slot_name, here.whereabouts)
        return found

    def __deepcopy__(self, memo: Any) -> Any:
        raise offloaded(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise offloaded(self, "pickle")


@cache
def _kind(here: type[torch.Tensor]) -> type[OffloadedTensor]:
    """Return the class for offloaded tensors whose class is otherwise `here`."""
    return type(f"Offloaded{here.__name__}", (OffloadedTensor, here), {"here": here})


def leave(tensor: torch.Tensor, name: str, where: str = OFFLOADED) -> None:
    """Note that the tensor's content has left the device: change its class. `where` it is, errors say."""
    if not isinstance(tensor, OffloadedTensor):
        try:
            tensor.__class__ = _kind(type(tensor))
        except TypeError:  # a class that others cannot take the place of
            return
        tensor.slot_name = name  # type: ignore[attr-defined]
        tensor.whereabouts = where  # type: ignore[attr-defined]


def arrive(tensor: torch.Tensor) -> None:
    """Note that the tensor's content is on the device, or about to be: give it its class back."""
    if isinstance(tensor, OffloadedTensor):
        del tensor.slot_name, tensor.whereabouts
        tensor.__class__ = tensor.here  # type: ignore[assignment]


def offloaded(tensor: OffloadedTensor, read_by: str) -> OffloadedError:
    """Return the error to raise where the numbers of an offloaded tensor are needed."""
    name = tensor.slot_name
    what, _, state = name.partition("::")
    kind = "The gradient of parameter" if is_gradient_slot(name) else f"State '{state}' of parameter"
    return OffloadedError(
        f"{kind if state else 'Parameter'} '{what}' is {tensor.whereabouts}, and its numbers are asked for "
        f"({read_by}): do it inside of `with step.on_device():`, which brings everything, or with "
        "one tensor after the other by `step.contents().lend(tensor, use)`."
    )


def _asks_for_form(name: str, is_property: bool) -> bool:
    if is_property:
        return name not in _NUMBERS
    return name in _FORM or (name.startswith(_ASKS) and name != "is_nonzero")


def _first(args: Any, kwargs: Any = None) -> OffloadedTensor:
    """Return the first offloaded tensor among the arguments of a function."""
    found = _within([*args, *(kwargs or {}).values()])
    assert found is not None
    return found


def _within(item: Any) -> OffloadedTensor | None:
    if isinstance(item, OffloadedTensor):
        return item
    if isinstance(item, (list, tuple)):
        return next((found for part in item if (found := _within(part)) is not None), None)
    return None
