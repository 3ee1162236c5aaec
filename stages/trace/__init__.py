"""Record the whole training step, forward + loss + backward + updates, as tables of ATen calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.trace import TraceMeta, TraceTables
from stowage.stages.trace.capture import capture
from stowage.stages.trace.lower import Lowering, compact, content_hash
from stowage.stages.trace.updates import append_updates
from stowage.stages.workload.calls import Loss

__all__ = ["trace_step"]


def trace_step(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    label: str = "",
    notices: list[str] | None = None,
    layouts: Mapping[str, torch.Tensor] | None = None,
) -> TraceTables:
    """Trace one training step of `model` on `batch`.

    Args:
        model: any module, its weights real or fake.
        batch: a mapping (keywords), a tuple or list (positions) or one argument; every tensor in it is an input.
        loss: `loss(outputs, batch)`; by default `outputs.loss`.
        optimizer: holds the model's parameters; None leaves gradients in `.grad`.
        label: the model's name, for people.
        notices: receives sentences that the user should know.
        layouts: of parameters that are not in memory: name -> a tensor on the meta device.

    Raises:
        TraceError: the step cannot be traced; the text names the module and the line.
    """
    captured = capture(model, batch, loss, layouts)
    if notices is not None:
        notices.extend(captured.notices)
    lowering = Lowering(captured)
    lowering.run()
    storages, values, calls, gradients, constants, loss_value = compact(lowering)
    optimizer_label = append_updates(storages, values, calls, gradients, optimizer, model) if optimizer else ""
    parameters = list(model.parameters())
    device = next((p.device.type for p in parameters), "cpu")
    configuration = content_hash(
        *(c.target + c.arguments for c in calls),
        *(repr((s.role, s.name, s.nbytes)) for s in storages),
        optimizer_label,
        device,
    )
    trace = TraceTables(
        storages=storages,
        values=values,
        calls=calls,
        gradients=gradients,
        constants=constants,
        meta=TraceMeta(
            configuration_hash=configuration,
            model=label or type(model).__name__,
            device=device,
            torch_version=torch.__version__.split("+")[0],
            loss_value=loss_value,
            optimizer=optimizer_label,
            parameters=sum(p.numel() for p in parameters),
        ),
    )
    trace.check()
    return trace
