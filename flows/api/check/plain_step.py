"""Runs one whole iteration in plain PyTorch, backward and update included, and undoes it bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.random.generators import GeneratorStates
from stowage.stages.runtime.random.python_state import PythonState
from stowage.stages.runtime.shadow.guard import Guard, Room, Saved
from stowage.stages.runtime.shadow.shadow import Compute, Number
from stowage.stages.trace.recording.kernels_by_content import kernels_by_content
from stowage.stages.trace.requires_grad import requiring_no_gradients
from stowage.stages.workload.autocast import without_autocast

EVERYTHING = Room(sys.maxsize, is_ample=True)
"""No limit: what plain PyTorch takes for this comparison does not count in the budget."""


@dataclass
class PlainStep:
    """The results of one plain iteration, as copies in the host's memory.

    Attributes:
        loss: the loss as a number.
        gradients: parameter -> its gradient, complete, before clipping.
        left: parameter -> what was in `.grad` after clipping.
        parameters: parameter -> its content.
        states: `parameter::state` -> its content.
        buffers: buffer -> its content.
    """

    loss: Number
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    compute: Compute,
    batch: Any,
    roots: tuple[Any, ...],
    *,
    parameters: Mapping[str, torch.Tensor],
    max_grad_norm: float | None,
    left_out: frozenset[str] = frozenset(),
    frozen: bool = False,
) -> PlainStep:
    """Run one iteration with everything in memory and return its results; afterwards all is as before.

    Args:
        model: the model of the step.
        optimizer: the optimizer of the step; without one gradients stay in `.grad`.
        compute: computes the loss from the model and the batch.
        batch: the batch of the step.
        roots: objects that `compute` calls.
        parameters: parameters of the model and others that the step trains, by name.
        max_grad_norm: the norm to clip gradients to, or None.
        left_out: parameters that are frozen in this step: their gradients are dropped.
        frozen: these parameters require no gradients, by which PyTorch chooses kernels.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    generators, saved = GeneratorStates.now(device), Saved()
    attributes = [vars(optimizer)] if optimizer is not None else []
    state = PythonState((model, compute, *roots, batch, *parameters.values(), *attributes))
    torch.clear_autocast_cache()
    try:
        absent = [parameters[name] for name in left_out] if frozen else []
        with Guard(EVERYTHING, None, saved), kernels_by_content(), torch.enable_grad(), requiring_no_gradients(absent):
            loss = compute(model, batch)
            found = PlainStep(Number.of(loss))
            with without_autocast():
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                del loss
                torch.clear_autocast_cache()
                for name in left_out:
                    parameters[name].grad = None
                found.gradients = _gradients(parameters)
                if max_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                found.left = _gradients(parameters)
                if optimizer is not None:
                    type(optimizer).step.__get__(optimizer)()  # without the wrapper by which schedulers count calls
        found.parameters = {name: _copy(p) for name, p in parameters.items()}
        found.states = {name: _copy(t) for name, t in states_of(optimizer, parameters)}
        found.buffers = {name: _copy(b) for name, b in model.named_buffers()}
        return found
    finally:
        saved.restore()
        state.restore()
        generators.restore()
        torch.clear_autocast_cache()


def first_difference(
    plain: PlainStep,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    offloading: Offloading | None,
    parameters: Mapping[str, torch.Tensor],
    equal: Callable[[torch.Tensor, torch.Tensor], bool],
) -> str | None:
    """Say in words where a planned iteration first differs from plain PyTorch; None where it does not."""
    contents = Contents(model, optimizer, offloading)
    contents.settle()
    here = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    kinds: list[tuple[str, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]] = [
        ("gradient of parameter", here, {n: g for n, g in plain.left.items() if n in here}),
        ("parameter", parameters, plain.parameters),
        ("optimizer state", dict(states_of(optimizer, parameters)), plain.states),
        ("buffer", dict(model.named_buffers()), plain.buffers),
    ]
    for kind, now, expected in kinds:
        for name in now:
            if name not in expected:
                return f"{kind} '{name}', which plain PyTorch does not have"
        for name, content in expected.items():
            if name not in now:
                return f"no {kind} '{name}', which plain PyTorch has"
            same: list[bool] = []
            contents.lend(now[name], lambda found, content=content, same=same: same.append(equal(found, content)))  # type: ignore[misc]
            if not same[0]:
                return f"another {kind} '{name}' than plain PyTorch"
    return None


def states_of(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among an optimizer's states, as `parameter::state` and tensor."""
    for name, parameter in parameters.items() if optimizer is not None else ():
        assert optimizer is not None
        for path, leaf in pytree.tree_flatten_with_path(dict(optimizer.state.get(parameter, {})))[0]:
            if isinstance(leaf, torch.Tensor):
                yield f"{name}::{'.'.join(str(getattr(k, 'key', getattr(k, 'idx', k))) for k in path)}", leaf


def _gradients(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _copy(p.grad) for name, p in parameters.items() if p.grad is not None}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
