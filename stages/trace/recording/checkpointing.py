"""Switches off the user's own gradient checkpointing while a step is traced, because the plan replaces it.

Plain PyTorch runs a checkpointed function twice, and changes what it changes, such as running statistics, twice. A plan
does not: such a function is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import fx, nn
from torch._ops import OpOverload

from stowage.stages.ir.errors import TraceError
from stowage.stages.trace.calls.operators import mutated_arguments, written_keywords
from stowage.stages.trace.recording.record import SOURCE

_GENERATORS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
"""The functions that run checkpointing that is not reentrant; which one is called depends on the release of torch."""


@contextmanager
def without_gradient_checkpointing(model: nn.Module, notices: list[str], graph: fx.Graph) -> Iterator[None]:
    """Switch off the model's own gradient checkpointing and restore it afterwards.

    Models of `transformers` have a flag. Calls of `torch.utils.checkpoint` become plain calls; otherwise backward would
    record each recomputation, with random numbers of its own.

    Args:
        model: the model.
        notices: receives what people should know.
        graph: what is recorded.

    Raises:
        TraceError: a checkpointed function changes what lasts.
    """
    switched = [m for m in model.modules() if m.__dict__.get("gradient_checkpointing") is True]
    called: list[Any] = []
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    patched: Any = checkpointing
    before = {name: vars(patched)[name] for name in ("CheckpointFunction", *_GENERATORS) if name in vars(patched)}

    class Plain:
        """Replaces the reentrant kind."""

        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *arguments: Any) -> Any:
            called.append(function)
            # The reentrant kind also computes no gradients if no input requires them.
            again = torch.is_grad_enabled() and any(map(_requires_grad, arguments))
            with torch.set_grad_enabled(again), _changing_nothing(graph) if again else nullcontext():
                return function(*arguments)

    def plain_generator(function: Any, *_arguments: Any, **_keywords: Any) -> Iterator[None]:
        called.append(function)
        with _changing_nothing(graph) if torch.is_grad_enabled() else nullcontext():
            yield

    vars(patched).update({name: plain_generator if name in _GENERATORS else Plain for name in before})
    try:
        yield
    finally:
        vars(patched).update(before)
        for module in switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]
    count = len(switched) or len(called)
    if count:
        kind = "modules" if switched else "calls"
        notices.append(
            f"The model's own gradient checkpointing ({count} {kind}) is switched off: the plan replaces it."
        )


def _requires_grad(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.requires_grad


@contextmanager
def _changing_nothing(graph: fx.Graph) -> Iterator[None]:
    """Refuse what is recorded inside the block if it writes to a source of the step."""
    before = len(graph.nodes)
    yield
    for node in islice(graph.nodes, before, None):
        for name in _written_sources(node):
            raise TraceError(
                f"A function under torch.utils.checkpoint changes {name}, which plain PyTorch changes a second time "
                "when it runs the function again in backward: call it without checkpoint; the plan itself decides what "
                "is computed again."
            )


def _written_sources(node: fx.Node) -> Iterator[str]:
    """Yield the names of the buffers, parameters and other tensors from outside that a call writes."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return
    arguments = list(node.args)
    written: list[Any] = [arguments[n] for n in mutated_arguments(node.target, arguments) if n < len(arguments)]
    written += [node.kwargs[name] for name in written_keywords(node.target) if name in node.kwargs]
    for item in (item for each in written for item in (each if isinstance(each, (list, tuple)) else [each])):
        source = _behind_views(item)
        if source is not None and SOURCE in source.meta:
            role, name = source.meta[SOURCE]
            yield f"{role} '{name}'"


def _behind_views(item: Any) -> fx.Node | None:
    while isinstance(item, fx.Node) and item.op == "call_function":
        if isinstance(item.target, OpOverload):  # else it takes one of several results
            first = next(iter(item.target._schema.arguments), None)
            if first is None or first.alias_info is None:
                return None
        item = item.args[0]
    return item if isinstance(item, fx.Node) else None
