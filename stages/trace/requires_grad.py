"""Finds where forward computes something else because parameters do not train: PyTorch, or the user's code, asks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn

from stowage.stages.ir.errors import TraceError
from stowage.stages.trace.capture import Captured
from stowage.stages.trace.recording.products import products_by_training
from stowage.stages.trace.recording.record import PATH


def notice_of_frozen(model: nn.Module, forward: Callable[[AbstractContextManager[None]], Captured]) -> str | None:
    """Return what the user of a step that freezes should know of its last bits.

    "" says that there is nothing, and None that the forward does not tell.

    A plan that freezes runs the kernels of the step in which everything trains, but for products with a weight that
    trains or not, which are recorded so that a step takes its own. PyTorch takes others elsewhere too: attention is
    fused only if its mask does not require gradients.

    Args:
        model: any module.
        forward: traces its forward and the loss inside a block, as they are in training, without backward.
    """
    try:
        taken: list[bool] = []
        trained = _calls(forward(products_by_training(taken)))
        with requiring_no_gradients(model.parameters()), warnings.catch_warnings(action="ignore"):
            frozen = _calls(forward(products_by_training(taken, again=True)))
    except TraceError:  # code that needs something to train, or that another thread disturbs, cannot be asked
        return None
    for (call, place), (other, _) in zip_longest(trained, frozen, fillvalue=(None, "")):
        if call != other:
            where = f"Module '{place}'" if place else "The forward"
            return (
                f"{where} computes with other kernels in plain PyTorch while parameters are frozen; losses and weights "
                "are those of plain PyTorch that computes all gradients and drops those of what is frozen, and may "
                "differ in the last bits from those with requires_grad=False."
            )
    return ""


@contextmanager
def requiring_no_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let some parameters require no gradients inside the block, as plain PyTorch freezes them."""
    changed = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in changed:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)


def _calls(captured: Captured) -> list[tuple[Any, str]]:
    """Return each call with its arguments, and the module that makes it, in order.

    What autograd saves is left out: it is detached, or copied before it is changed in place.
    """
    numbers: dict[fx.Node, int] = {}
    found: list[tuple[Any, str]] = []
    for node in captured.graph.nodes:
        saved = node.target is torch.ops.aten.clone.default and not node.users
        if saved or node.target is torch.ops.aten.detach.default:
            numbers[node] = numbers[node.args[0]]
            continue
        if node.op == "call_function":
            found.append((_content(node, numbers), node.meta.get(PATH, "")))
        numbers[node] = len(numbers) if node.op == "placeholder" else -len(found)
    return found


def _content(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    """Return a call as text, in which other calls have their numbers for names."""
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
    return f"{node.target}{arguments}"
