"""Decisions on values that are the same in every step, which eager takes and a trace must take alike.

Models of `transformers` look at positions to see whether several sequences are packed into one row. Where none are,
eager calls attention with `is_causal` and no mask. Tracers cannot read tensors: the library assumes packing
and builds a mask: another kernel, with other numbers on a GPU, and the mask's memory. Positions that the model made
itself do not depend on the batch, and their values are known while tracing: then the decision is eager's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot

from stowage.stages.trace.operators import is_random

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value, on the CPU, of a traced tensor that was made from numbers alone; None where it depends on an input."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    if slot is None:
        return None
    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.no_grad():
        value: torch.Tensor | None = _evaluate(slot.proxy.node, {})
    return value


def _evaluate(node: fx.Node, done: dict[fx.Node, Any]) -> Any:
    if node in done:
        return done[node]
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable or is_random(target):
        return None
    if any(_evaluate(other, done) is None for other in node.all_input_nodes):
        return None

    def leaf(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return done[item]
        return torch.device("cpu") if isinstance(item, torch.device) else item

    args, kwargs = pytree.tree_map(leaf, (list(node.args), dict(node.kwargs)))
    done[node] = target(*args, **kwargs)
    return done[node]


@contextmanager
def packing_as_in_eager() -> Iterator[None]:
    """While a model is traced: positions with known values are looked at, as eager does."""
    module = sys.modules.get(_MODULE)
    looks: Any = getattr(module, _FUNCTION, None)
    if looks is None:
        yield
        return

    def look(position_ids: torch.Tensor) -> torch.Tensor | None:
        value = known_value(position_ids)
        if value is not None:
            with disable_proxy_modes_tracing(), unset_fake_temporarily():
                if looks(value) is None:
                    return None
        packed: torch.Tensor | None = looks(position_ids)
        return packed

    setattr(module, _FUNCTION, look)
    try:
        yield
    finally:
        setattr(module, _FUNCTION, looks)
