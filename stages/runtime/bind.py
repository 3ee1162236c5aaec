"""Makes a program that runs from a plan's tables and a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from stowage.stages.device.allocator import prepare_allocator
from stowage.stages.device.heap import keep_freed_memory
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.plan import Slot
from stowage.stages.ir.trace import TraceTables, Value
from stowage.stages.runtime.executors.iteration import SingleIteration
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.program import MakeIteration, Program, constant_tensors, load_step
from stowage.stages.structure.tree import ModuleTree


def bind(
    source: str,
    source_hash: str,
    filename: str,
    trace: TraceTables,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    slots: Sequence[Slot] = (),
    offloading: Offloading | None = None,
    outside: Mapping[str, torch.Tensor] | None = None,
    tree: ModuleTree | None = None,
    surroundings: MakeIteration = SingleIteration,
    units: Sequence[str] = (),
) -> Program:
    """Load generated code and bind it to `model`.

    Args:
        source: the text of the generated step.
        source_hash: the hash that the plan's manifest states for the text.
        filename: the name under which tracebacks show the text.
        trace: the traced step that was planned.
        model: the model to run on.
        optimizer: updates the model's parameters; None leaves gradients in `.grad`.
        slots: the plan's places in the lower tier.
        offloading: the lower tier of this model; None where the plan needs none.
        outside: tensors that belong neither to the model nor to the batch, by the names of the trace.
        tree: the model's module tree, if it is shared with others.
        surroundings: makes what each run of the step sees.
        units: names of the units that may be frozen.

    Raises:
        PlanMismatchError: the code was changed, or the model's parameters or buffers are not the traced ones.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    left = {trace.values[v].storage for v in trace.meta.left}
    rooms = {
        v.source.removeprefix("outside:"): _meta(v)
        for v in trace.values
        if v.storage in left and v.source.startswith("outside:")
    }
    sources = [(*v.source.partition(":"), v) for v in trace.values if v.source]
    live = ("parameter", "buffer", "outside")
    expected = {name: (v.dtype, v.shape) for role, _, name, v in sources if role in live}
    actual = {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in [*model.named_parameters(), *model.named_buffers(), *(outside or {}).items(), *rooms.items()]
    }
    wrong = [name for name in expected if actual.get(name) != expected[name]]
    if wrong:
        raise PlanMismatchError(
            f"The plan is for another model: parameter or buffer '{wrong[0]}' is {actual.get(wrong[0], 'absent')}, the "
            f"plan expects {expected[wrong[0]]}; plan this model again."
        )
    if device.type != trace.meta.device:
        raise PlanMismatchError(
            f"The plan was traced on {trace.meta.device}, the model is on {device.type}: trace it there again."
        )
    if offloading is None and device.type == "cpu":
        keep_freed_memory()
    prepare_allocator(device)
    return Program(
        load_step(source, source_hash, filename, {c.target for c in trace.calls}),
        model,
        optimizer,
        constant_tensors(trace.constants, trace.values, device),
        [name for role, _, name, _ in sources if role == "input"],
        slots,
        offloading,
        outside,
        rooms,
        tree,
        surroundings,
        units,
    )


def _meta(value: Value) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta")
