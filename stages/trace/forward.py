"""Record a forward alone, as evaluation runs it, as tables of ATen calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.trace import Call, Constant, Storage, TraceMeta, TraceTables, Value
from stowage.stages.trace.capture import capture
from stowage.stages.trace.lower import Lowering, compact, content_hash
from stowage.stages.trace.readings import Readings, traced_alike
from stowage.stages.workload.outputs import OutputForm

Forward = Callable[[nn.Module, Any], Any]
"""From the model and the batch to whatever evaluation needs of them."""


@dataclass(frozen=True)
class RecordedForward:
    """A forward of one batch, traced.

    Attributes:
        outputs: values that it returns.
        form: what it returns, without its tensors.
    """

    storages: list[Storage]
    values: list[Value]
    calls: list[Call]
    constants: list[Constant]
    outputs: tuple[int, ...]
    form: OutputForm
    notices: list[str]
    outside: Mapping[str, torch.Tensor] = field(default_factory=dict)


def record_forward(
    model: nn.Module, batch: Any, forward: Forward, layouts: Mapping[str, torch.Tensor] | None = None
) -> RecordedForward:
    """Trace `forward(model, batch)` as it runs under `torch.no_grad()`, in the mode in which the model is.

    Args:
        layouts: of parameters that are not in memory, see `trace_step`.

    Raises:
        TraceError: it cannot be traced, or returns no tensor, or what cannot be made again for another batch.
    """
    forms: list[OutputForm] = []

    def compute(model: nn.Module, batch: Any) -> list[torch.Tensor]:
        form, tensors = OutputForm.of(forward(model, batch))
        forms.append(form)
        return tensors

    def once(readings: Readings) -> RecordedForward:
        captured = capture(
            model, batch, compute, layouts, gradients=False, roots={"forward": forward}, readings=readings
        )
        lowering = Lowering(captured)
        lowering.run()
        storages, values, calls, _, constants, outputs = compact(lowering)
        return RecordedForward(
            storages, values, calls, constants, outputs, forms[-1], captured.notices, captured.outside
        )

    return traced_alike(once)


def forward_tables(
    recorded: RecordedForward, model: nn.Module, beside: Sequence[Storage] = (), label: str = ""
) -> TraceTables:
    """The tables of a forward.

    Args:
        beside: what else of the model is in memory: optimizer states, and gradients that wait.
        label: the model's name, for people.
    """
    count = len(recorded.storages)
    storages = [*recorded.storages, *(replace(s, storage=count + i) for i, s in enumerate(beside))]
    parameters = list(model.parameters())
    device = next((p.device.type for p in parameters), "cpu")
    configuration = content_hash(
        "forward",
        *(c.target + c.arguments for c in recorded.calls),
        *(repr((s.role, s.name, s.nbytes)) for s in storages),
        repr(recorded.outputs),
        device,
    )
    trace = TraceTables(
        storages=storages,
        values=recorded.values,
        calls=recorded.calls,
        gradients=[],
        constants=recorded.constants,
        meta=TraceMeta(
            configuration_hash=configuration,
            model=label or type(model).__name__,
            device=device,
            torch_version=torch.__version__.split("+")[0],
            loss_value=-1,
            optimizer="",
            parameters=sum(p.numel() for p in parameters),
            outputs=recorded.outputs,
        ),
    )
    trace.check()
    return trace
