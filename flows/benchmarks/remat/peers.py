"""Peers of the rematerialization benchmark: what others do to save memory.

An iteration is forward and backward, with gradients left in `.grad`. Each peer is plain PyTorch with one thing switched
on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stowage.flows.benchmarks.remat.models import RematCase
from stowage.flows.benchmarks.remat.names import CHECKPOINTING, EAGER, EVERY_ROOT, MEMORY_BUDGET
from stowage.stages.ir.errors import StowageError
from stowage.stages.runtime.observe.measure import Measurement, measure_iteration
from stowage.stages.workload.calls import call_model, loss_of

BACKENDS = ("aot_eager", "aot_eager_decomp_partition")
"""Backends of `torch.compile`, with the partitioner that knows the budget; the first that runs is used.

The first runs the operators of plain PyTorch, but some of its programs end with an error (a view of strides that the
operator does not give); the second takes operators apart first, which is slower without a compiler and rounds
otherwise.
"""


class Peer:
    """One contestant: `peer(batch)` runs an iteration, `peer.measure(batch)` runs one under the profiler.

    Attributes:
        how: says more about the contestant, such as its backend.
    """

    def __init__(self, case: RematCase, model: Any, how: str = "") -> None:
        self._case, self._model, self.how = case, model, how

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run forward and backward."""
        loss = loss_of(call_model(self._model, batch), batch, self._case.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def measure(self, batch: Any) -> Measurement:
        """Run one iteration, and measure its peak."""
        return measure_iteration(self, self._case.model, None, batch, [])


def available(case: RematCase) -> list[str]:
    """Return the names of the peers that apply to a model; `make_peer` takes them."""
    found = [EAGER]
    if getattr(case.model, "supports_gradient_checkpointing", False):
        found.append(CHECKPOINTING)
    if case.layers:
        found.append(EVERY_ROOT)
    return [*found, MEMORY_BUDGET]


def make_peer(name: str, case: RematCase, setting: float = 1.0) -> Peer:
    """Make a peer: plain PyTorch with one thing switched on.

    Args:
        name: one of `available`.
        case: the model, changed in place.
        setting: for PyTorch's activation memory budget, its value between 0 and 1.

    Raises:
        StowageError: there is no such peer.
    """
    model: Any = case.model
    if name == CHECKPOINTING:
        model.gradient_checkpointing_enable()
    elif name == EVERY_ROOT:
        for path in case.layers:
            _checkpoint_list(model, path, grouped=case.grouped)
    elif name == MEMORY_BUDGET:
        return _compiled(case, setting)
    elif name != EAGER:
        raise StowageError(f"There is no peer {name!r}: take one of {', '.join(available(case))}.")
    return Peer(case, model)


def _compiled(case: RematCase, setting: float) -> Peer:
    return Peer(case, *compiled(case.model, setting, lambda model: Peer(case, model)(case.batch)))


def compiled(model: nn.Module, setting: float, iterate: Callable[[Any], object]) -> tuple[Any, str]:
    """Compile a model within PyTorch's activation memory budget.

    Args:
        model: the model.
        setting: the budget, between 0 and 1.
        iterate: runs one iteration of what it is given.

    Returns:
        The compiled model, and the name of the first backend whose program runs.
    """
    from torch._functorch import config

    config.activation_memory_budget = setting
    failure: Exception | None = None
    for backend in BACKENDS:
        torch._dynamo.reset()
        found = torch.compile(model, backend=backend, dynamic=False)
        try:
            iterate(found)
        except Exception as error:  # a compiler may raise anything
            failure = failure or error
            continue
        return found, backend
    assert failure is not None
    raise failure


def _checkpoint_list(model: nn.Module, path: str, *, grouped: bool) -> None:
    """Put the layers of a list into checkpoints, √n in each, or one where each is called by itself."""
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    layers: Any = getattr(holder, name)
    size = max(1, round(math.sqrt(len(layers)))) if grouped else 1
    parts = [_Segment(list(layers)[i : i + size]) for i in range(0, len(layers), size)]
    setattr(holder, name, nn.Sequential(*parts) if isinstance(layers, nn.Sequential) else nn.ModuleList(parts))


class _Segment(nn.Module):
    """Runs layers one after another in one checkpoint; other attributes are those of the first layer."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, x, *args, use_reentrant=False, **kwargs)

    def _run(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            x = layer(x[0] if isinstance(x, tuple) else x, *args, **kwargs)
        return x

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layers: Any = super().__getattr__("layers")
            return getattr(layers[0], name)
