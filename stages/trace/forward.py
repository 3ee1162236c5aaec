"""Records a forward alone, as evaluation runs it, as tables of ATen calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.trace import Call, Constant, Storage, TraceMeta, TraceTables, Value
from stowage.stages.rewrite.sharding import shard_parameters
from stowage.stages.trace.calls.signature import content_hash
from stowage.stages.trace.capture import Captured, capture
from stowage.stages.trace.objects.effects import Left
from stowage.stages.trace.objects.left import Seen
from stowage.stages.trace.objects.outside import Outside
from stowage.stages.trace.recording.readings import Readings
from stowage.stages.trace.rounds import trace_rounds
from stowage.stages.workload.outputs import OutputForm

Forward = Callable[[nn.Module, Any], Any]
"""Maps the model and the batch to whatever evaluation needs."""


@dataclass(frozen=True)
class RecordedForward:
    """The traced forward of one batch.

    Attributes:
        outputs: the first `returns` values are those that it returns; the others are those that `left` takes.
        form: its outputs without their tensors.
    """

    storages: list[Storage]
    values: list[Value]
    calls: list[Call]
    constants: list[Constant]
    outputs: tuple[int, ...]
    form: OutputForm
    notices: list[str]
    outside: Outside = field(default_factory=lambda: Outside({}, {}))
    left: Left = field(default_factory=Left)
    returns: int = 0


def record_forward(
    model: nn.Module,
    batch: Any,
    forward: Forward,
    layouts: Mapping[str, torch.Tensor] | None = None,
    touches: Sequence[Any] = (),
) -> RecordedForward:
    """Trace `forward(model, batch)` as it runs under `torch.no_grad()`, in the mode in which the model is.

    Args:
        model: any module.
        batch: any batch.
        forward: calls the model.
        layouts: layouts of parameters that are not in memory, see `trace_step`.
        touches: objects that it may change besides those that can be reached from the others.

    Raises:
        TraceError: it cannot be traced, or returns no tensor, or what cannot be made again for another batch.
    """
    forms: list[OutputForm] = []

    def compute(model: nn.Module, batch: Any) -> list[torch.Tensor]:
        form, tensors = OutputForm.of(forward(model, batch))
        forms.append(form)
        return tensors

    def trace(readings: Readings, changed: Sequence[Seen]) -> Captured:
        return capture(
            model,
            batch,
            compute,
            layouts,
            gradients=False,
            roots={"forward": forward, **{f"touched {i}": item for i, item in enumerate(touches)}},
            readings=readings,
            changed=changed,
        )

    captured, tables, left = trace_rounds(trace)
    return RecordedForward(
        tables.storages,
        tables.values,
        tables.calls,
        tables.constants,
        (*tables.outputs, *tables.left),
        forms[0],
        captured.notices,
        captured.outside,
        left,
        len(tables.outputs),
    )


def forward_tables(
    recorded: RecordedForward, model: nn.Module, beside: Sequence[Storage] = (), label: str = "", ranks: int = 1
) -> TraceTables:
    """Return the tables of a forward.

    Args:
        recorded: the traced forward.
        model: the model that was traced.
        beside: what else of the model is in memory: optimizer states and waiting gradients.
        label: the model's name, for people.
        ranks: number of ranks that hold a shard of each parameter.

    Raises:
        ParameterError: ranks hold shards of a parameter that the forward returns as it is.
    """
    recorded = _sharded(recorded, ranks) if ranks > 1 else recorded
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


def _sharded(recorded: RecordedForward, ranks: int) -> RecordedForward:
    """Return a forward whose parameters are shards, which it gathers."""
    found = shard_parameters(
        list(recorded.storages), list(recorded.values), list(recorded.calls), ranks, outside=recorded.outside
    )
    for output in recorded.outputs:
        storage = found.values[output].storage
        if storage in found.forms:
            raise ParameterError(
                f"The forward returns parameter '{found.storages[storage].name}' itself, of which each rank has a "
                "shard: read parameters inside of `with step.on_device():` instead."
            )
    return replace(recorded, storages=found.storages, values=found.values, calls=found.calls)
