"""Records the whole training step (forward, loss, backward and updates) as tables of ATen calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from stowage.stages.freezing.units import units_of
from stowage.stages.ir.quiet import quiet_torch
from stowage.stages.ir.trace import Call, Constant, Gradient, Storage, TraceMeta, TraceTables, Value
from stowage.stages.ir.units import Unit
from stowage.stages.optimizers import KnownOptimizer
from stowage.stages.rewrite.sharding import shard_parameters
from stowage.stages.trace.calls.signature import content_hash
from stowage.stages.trace.capture import Captured, capture
from stowage.stages.trace.layouts_by_training import OwnLayouts, copy_before, own_layouts
from stowage.stages.trace.objects.effects import Left
from stowage.stages.trace.objects.left import Seen
from stowage.stages.trace.objects.outside import Outside
from stowage.stages.trace.recording.kernels_by_training import Layouts, kernels_by_training
from stowage.stages.trace.recording.readings import Readings
from stowage.stages.trace.requires_grad import notice_of_frozen, other_kernels
from stowage.stages.trace.rounds import trace_rounds
from stowage.stages.trace.updates import MicroBatch, append_updates
from stowage.stages.workload.calls import Loss, Objective, compute_loss


@dataclass(frozen=True)
class Recorded:
    """The traced forward and backward of one batch; `with_updates` adds what happens to the gradients."""

    storages: list[Storage]
    values: list[Value]
    calls: list[Call]
    gradients: list[Gradient]
    constants: list[Constant]
    loss_value: int
    notices: list[str]
    outside: Outside = field(default_factory=lambda: Outside({}, {}))
    """Tensors that belong neither to the model nor to the batch, by the name that `storages` has for them."""
    left_values: tuple[int, ...] = ()
    left: Left = field(default_factory=Left)
    """The effects of the step on the user's objects; they take the values in `left_values`."""
    counted: frozenset[int] = frozenset()
    """Positions in `left_values` of values that replace a source of the trace."""

    def stands(self) -> bool:
        """Say whether everything outside of model and batch still is of the kind that was traced."""
        return self.outside.differs() is None and self.left.stands()


def parameters_of(model: nn.Module, outside: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's parameters, and those outside of it that a step reads."""
    return with_outside(dict(model.named_parameters()), outside)


def with_outside(
    parameters: Mapping[str, torch.Tensor], outside: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return a model's parameters, and those outside of it that a step reads."""
    return {**parameters, **{name: t for name, t in outside.items() if t.requires_grad and t.is_leaf}}


def record_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    objective: Objective | None = None,
    layouts: Mapping[str, torch.Tensor] | None = None,
    decisions: tuple[bool, ...] = (),
    touches: Sequence[Any] = (),
    merges: bool = True,
    freezes: bool = False,
) -> Recorded:
    """Trace forward, loss and backward.

    Args:
        model: see `trace_step`.
        batch: see `trace_step`.
        loss: see `trace_step`.
        objective: see `trace_step`.
        layouts: see `trace_step`.
        decisions: see `trace_rounds`.
        touches: objects that the step may change besides those that can be reached from the others.
        merges: compute equal masks once; False for a step that is not run from its tables, but as it is.
        freezes: parameters will be frozen: products are recorded so that each step takes the kernels that plain PyTorch
            takes; where something else depends on what trains, a notice says so, and they are not.
    """
    named = (("loss", loss), ("objective", objective), *((f"touched {i}", item) for i, item in enumerate(touches)))
    roots = {name: item for name, item in named if item is not None}

    def trace(
        readings: Readings,
        changed: Sequence[Seen] = (),
        *,
        backward: bool = True,
        kernels: Callable[[], AbstractContextManager[None]] = kernels_by_training if freezes else nullcontext,
    ) -> Captured:
        def compute(model: nn.Module, batch: Any) -> list[torch.Tensor]:
            return [compute_loss(model, batch, loss=loss, objective=objective, trains=backward)]

        with kernels():
            captured = capture(
                model, batch, compute, layouts, backward=backward, roots=roots, readings=readings, changed=changed
            )
        return replace(captured, merges=merges)

    captured, tables, left = trace_rounds(trace, decisions)
    notices = captured.notices
    if freezes:
        decided = tuple(truth for _, truth in captured.readings.truths)
        again = partial(trace, Readings(decisions=decided))
        said = notice_of_frozen(model, lambda kernels: again(backward=False, kernels=lambda: kernels))
        frozen = partial(kernels_by_training, layouts=Layouts(frozen=True))
        own = own_layouts(captured.graph, lambda: again(kernels=frozen).graph) if said == "" else OwnLayouts()
        if own is None:
            said = other_kernels("Backward")
        if said != "":  # then all of it is as if everything trained
            captured, tables, left = trace_rounds(partial(trace, kernels=nullcontext), decisions)
            notices = [*captured.notices, *([said] if said else [])]
        elif own is not None and own != OwnLayouts():
            captured, tables, left = trace_rounds(partial(_laid_out, trace, own), decisions)
            notices = captured.notices
    return Recorded(
        tables.storages,
        tables.values,
        tables.calls,
        tables.gradients,
        tables.constants,
        tables.outputs[0],
        notices,
        captured.outside,
        tables.left,
        left,
        tables.counted,
    )


def _laid_out(trace: Any, own: OwnLayouts, readings: Readings, changed: Sequence[Seen] = ()) -> Captured:
    """Trace a step with plain PyTorch's layouts."""
    captured: Captured = trace(readings, changed, kernels=lambda: kernels_by_training(layouts=Layouts(own.results)))
    copy_before(captured.graph, own.copied)
    return captured


def trace_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    objective: Objective | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batch: MicroBatch | None = None,
    label: str = "",
    notices: list[str] | None = None,
    layouts: Mapping[str, torch.Tensor] | None = None,
    freezes: bool = False,
) -> TraceTables:
    """Trace one training step of `model` on `batch`.

    Args:
        model: any module, its weights real or fake.
        batch: a mapping (keywords), a tuple or list (positions) or one argument; every tensor in it is an input.
        loss: `loss(outputs, batch)`; by default `outputs.loss`.
        objective: `objective(model, batch)`, instead of `loss`, for those who call the model themselves.
        optimizer: the optimizer of the model's parameters; None leaves gradients in `.grad`.
        micro_batch: what happens to the gradients; by default they go into updates at once.
        label: the model's name, for people.
        notices: a list to which sentences that the user should know are added.
        layouts: name of a parameter that is not in memory -> a tensor of its layout on the meta device.
        freezes: see `record_step`.

    Raises:
        TraceError: the step cannot be traced; the text names the module and the line.
    """
    recorded = record_step(model, batch, loss=loss, objective=objective, layouts=layouts, freezes=freezes)
    if notices is not None:
        notices.extend(recorded.notices)
    return with_updates(recorded, model, optimizer=optimizer, micro_batch=micro_batch, label=label)


@quiet_torch()
def with_updates(
    recorded: Recorded,
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | KnownOptimizer | None = None,
    micro_batch: MicroBatch | None = None,
    label: str = "",
) -> TraceTables:
    """Return the whole iteration: what was recorded, and what happens to its gradients.

    One record serves every micro-batch.

    Raises:
        TraceError: the optimizer cannot be stepped by a plan.
    """
    storages, values, calls = list(recorded.storages), list(recorded.values), list(recorded.calls)
    uncounted = [value for i, value in enumerate(recorded.left_values) if i not in recorded.counted]
    for value in uncounted:  # what the previous step has left is still in memory
        storage_of_value = values[value].storage
        storages.append(
            Storage(
                len(storages),
                storages[storage_of_value].nbytes,
                "outside",
                f"before: {storages[storage_of_value].name}",
            )
        )
    named = parameters_of(model, recorded.outside)
    micro_batch, whole, units = micro_batch or MicroBatch(), None, list[Unit]()
    if micro_batch.ranks > 1:
        whole = {v.source.removeprefix("parameter:"): v for v in values if v.source.startswith("parameter:")}
        sharded = shard_parameters(
            storages,
            values,
            calls,
            micro_batch.ranks,
            bucket_bytes=micro_batch.bucket_bytes,
            outside=recorded.outside,
        )
        storages, values, calls = sharded.storages, sharded.values, sharded.calls
        units = units_of(recorded, micro_batch.units) if micro_batch.units is not None else []
    known = KnownOptimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    optimizer_label = append_updates(
        storages, values, calls, recorded.gradients, known, named, micro_batch, whole, units, recorded.outside
    )
    parameters = list(named.values())
    device = next((p.device.type for p in parameters), "cpu")
    configuration = content_hash(
        *(c.target + c.arguments for c in calls),
        *(repr((s.role, s.name, s.nbytes)) for s in storages),
        optimizer_label,
        device,
        repr(recorded.left_values),
    )
    trace = TraceTables(
        storages=storages,
        values=values,
        calls=calls,
        gradients=recorded.gradients,
        constants=recorded.constants,
        meta=TraceMeta(
            configuration_hash=configuration,
            model=label or type(model).__name__,
            device=device,
            torch_version=torch.__version__.split("+")[0],
            loss_value=recorded.loss_value,
            optimizer=optimizer_label,
            parameters=sum(p.numel() for p in parameters),
            left=recorded.left_values,
        ),
    )
    trace.check()
    return trace
