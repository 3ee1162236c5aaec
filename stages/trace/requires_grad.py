"""Finds where forward computes something else because parameters do not train: PyTorch, or the user's code, asks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn

from stowage.stages.ir.errors import TraceError
from stowage.stages.trace.capture import Captured
from stowage.stages.trace.recording.deciders import Taken
from stowage.stages.trace.recording.kernels_by_training import kernels_by_training
from stowage.stages.trace.recording.own_calls import OwnCall, OwnCalls
from stowage.stages.trace.recording.record import PATH


def notice_of_frozen(model: nn.Module, forward: Callable[[AbstractContextManager[None]], Captured]) -> str | None:
    """Return what the user of a step that freezes should know of its last bits.

    "" says that there is nothing, and None that the forward does not tell.

    A plan that freezes runs the kernels of the step in which everything trains, but for products with a weight that
    trains or not, and attention with such a mask, which are recorded so that a step takes its own. PyTorch may take
    others elsewhere too.

    Args:
        model: any module.
        forward: traces its forward and the loss inside a block, as they are in training, without backward.

    Raises:
        TraceError: the user's code does something else where nothing trains.
    """
    own, own_frozen = OwnCalls(), OwnCalls()
    try:
        taken = Taken()
        trained = _calls(forward(_both(kernels_by_training(taken), own)))
        with requiring_no_gradients(model.parameters()), warnings.catch_warnings(action="ignore"):
            frozen = _calls(forward(_both(kernels_by_training(taken.again()), own_frozen)))
    except TraceError:  # code that needs something to train, or that another thread disturbs, cannot be asked
        return None
    _refuse_code_that_asks(own.calls, own_frozen.calls)
    for (call, place), (other, _) in zip_longest(trained, frozen, fillvalue=(None, "")):
        if call != other:
            return other_kernels(f"Module '{place}'" if place else "The forward")
    return ""


def other_kernels(where: str) -> str:
    """Return what is said where a step that freezes has other kernels than plain PyTorch."""
    return (
        f"{where} computes with other kernels in plain PyTorch while parameters are frozen; losses and weights are "
        "those of plain PyTorch that computes all gradients and drops those of what is frozen, and may differ in the "
        "last bits from those with requires_grad=False."
    )


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _refuse_code_that_asks(trained: Sequence[OwnCall], frozen: Sequence[OwnCall]) -> None:
    """Refuse a forward whose own code, and not only PyTorch's, depends on what trains: a plan has one for all masks.

    Raises:
        TraceError: it names the first line that does something else.
    """
    for call, other in zip_longest(trained, frozen):
        if call != other:
            raise TraceError(
                f"What the model computes depends on whether its parameters train ({(call or other).line} is reached, "
                "or calls PyTorch, otherwise while they are frozen), and a plan that freezes computes the same in all "
                "steps: let the code not ask for requires_grad, or train without freeze."
            )


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

    What autograd saves is left out: it is detached, or copied before it is changed in place. A view counts where it is
    read: autograd makes those of tensors anew that are changed in place.
    """
    names: dict[fx.Node, str] = {}
    found: list[tuple[Any, str]] = []
    given = 0
    for node in captured.graph.nodes:
        saved = node.target is torch.ops.aten.clone.default and not node.users
        if saved or node.target is torch.ops.aten.detach.default:
            names[node] = names[node.args[0]]
        elif getattr(node.target, "is_view", False):
            names[node] = _content(node, names)
        elif node.op == "call_function":
            found.append((_content(node, names), node.meta.get(PATH, "")))
            names[node] = f"%-{len(found)}"
        else:
            given += 1
            names[node] = f"%{given}"
    return found


def _content(node: fx.Node, names: dict[fx.Node, str]) -> str:
    """Return a call as text, in which others have names."""
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: names[n])
    return f"{node.target}{arguments}"
