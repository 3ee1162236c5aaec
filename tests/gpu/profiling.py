"""Profile a step, and look at indices that are made up for it before a kernel does: on a GPU one that points outside
leaves the context dead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.device import device_of
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.trace import TraceTables
from stowage.stages.profile import CostStore, profile_trace
from stowage.stages.trace import record_step, with_updates
from tests.gpu.cases import Case


@dataclass(frozen=True)
class Profiled:
    """A step and what its calls cost.

    Attributes:
        trace: the step.
        costs: by signature.
        indices: tensors of indices that were looked at.
    """

    trace: TraceTables
    costs: dict[str, Cost]
    indices: int


class PointsOutsideError(BaseException):
    """An index among the arguments of a kernel points outside of a tensor. No `except Exception` catches it."""


class IndexGuard(TorchDispatchMode):
    """Looks at indices before a kernel does. `seen` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        for index, bound, ignored in _indices(name, args):
            if index.numel():
                self.seen += 1
                lowest, highest = int(index.min()), int(index.max())
                if highest >= bound or (lowest < 0 and lowest != ignored):
                    raise PointsOutsideError(f"{func}: indices {lowest} … {highest} into {bound}")
        return func(*args, **(kwargs or {}))


def _indices(name: str, args: Any) -> list[tuple[torch.Tensor, int, int]]:
    """Indices of the operators that small language models use: each with what it must be below, and the one negative
    number that it may be."""
    match name:
        case "embedding":
            return [(args[1], args[0].shape[0], 0)]
        case "embedding_dense_backward":
            return [(args[1], args[2], 0)]
        case "nll_loss_forward":
            return [(args[1], args[0].shape[-1], args[4])]
        case "nll_loss_backward":
            return [(args[2], args[1].shape[-1], args[5])]
        case "index" | "index_put" | "index_put_" | "_index_put_impl_":
            pairs = [(i, args[0].shape[d]) for d, i in enumerate(args[1]) if i is not None and i.dtype != torch.bool]
            return [(i.remainder(n) if bool((i >= -n).all()) else i, n, 0) for i, n in pairs]
        case "gather" | "scatter" | "scatter_" | "scatter_add" | "scatter_add_" | "index_select":
            return [(args[2], args[0].shape[args[1]], 0)]
        case _:
            return []


def profile(case: Case, folder: Path) -> Profiled:
    """Measure every call.

    Raises:
        PointsOutsideError: one of them was outside.
    """
    kind = torch.device(case.device).type
    target = DeviceDescription(device_of(kind).fingerprint(), "", kind, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    guard = IndexGuard()

    def attempt() -> Profiled:
        model, batches = case.build()
        recorded = record_step(model, batches[0], objective=case.loss)
        trace = with_updates(recorded, model, optimizer=case.optimizer(model.parameters()))
        with guard:
            store = CostStore(folder / "costs")
            costs = profile_trace(trace, target, store, seconds_per_call=0.0, min_samples=2)
        return Profiled(trace, {c.signature: c for c in costs}, guard.seen)

    before = _generators(case.device)
    found = with_true_kernels(attempt)
    if any(not torch.equal(a, b) for a, b in zip(before, _generators(case.device), strict=True)):
        raise AssertionError("profiling has drawn from the global generators")
    return found


def _generators(device: str) -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state(device)] if device != "cpu" else []
    return [torch.get_rng_state(), *on_gpu]
