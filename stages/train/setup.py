"""Makes what is trained, as params.yaml says: anew for every run from the same seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.stages.settings import Settings
from stowage.stages.train.loop import Batches
from stowage.stages.workload import sample_batch, scheduler_factory, token_stream
from stowage.stages.workload.calls import Loss, call_model, loss_of
from stowage.stages.workload.configured import configured_optimizer, configured_workload
from stowage.stages.workload.data import batch_at
from stowage.stages.workload.models import resolve, vocabulary_size
from stowage.stages.workload.user_batches import UserBatches


@dataclass(frozen=True)
class Setup:
    """A model with what trains it.

    Attributes:
        function: computes the loss of outputs and batch; None where the model does.
        stream: the text as tokens; None where batches are made up, or come from a function of the user's.
        made: batches from a function of the user's; None without one.
    """

    model: nn.Module
    sample: Any
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    function: Loss | None
    stream: torch.Tensor | None
    made: UserBatches | None = None

    @staticmethod
    def of(settings: Settings) -> Setup:
        """Make model, optimizer, schedule and text.

        Raises:
            ParameterError: one of them cannot be made, or the schedule ends before training does.
        """
        trace, schedule = settings.trace, settings.train.schedule
        workload = configured_workload(trace)
        model = workload.model.to(trace.device)
        make = configured_optimizer(trace)
        optimizer = make(list(model.parameters())) if make else None
        scheduler = None
        if schedule is not None and optimizer is not None:
            steps = settings.train.steps
            scheduler = scheduler_factory(schedule.name, schedule.arguments, optimizer, steps)(optimizer)
        function = resolve(trace.loss, "trace.loss") if trace.loss else None
        return Setup(
            model,
            workload.batch,
            optimizer,
            scheduler,
            function,
            _stream(settings, model, workload.batch),
            _made(settings, workload.batch),
        )

    def loss_by(self, model: nn.Module) -> Callable[[Any], torch.Tensor]:
        """Return a function from a batch to its loss, computed through `model`, which has or wraps this one."""
        return lambda batch: loss_of(call_model(model, batch), batch, self.function)

    def batches(self, settings: Settings) -> Batches:
        """Return a function from the iteration to its batch."""
        trace, train = settings.trace, settings.train
        device = torch.device(trace.device)

        def moved(batch: Any) -> Any:
            return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

        if self.made is not None:
            return self.made
        if trace.model.callable is not None:
            return lambda _: self.sample
        stream = self.stream
        if stream is not None:
            return lambda i: moved(batch_at(stream, trace.batch_size, trace.sequence_length, train.seed, i))
        return lambda i: moved(sample_batch(self.model, trace.batch_size, trace.sequence_length, train.seed + i))


def _stream(settings: Settings, model: nn.Module, sample: Any) -> torch.Tensor | None:
    """Return the text, which only models of tokens have."""
    data = settings.train.data
    other = data.callable is not None or settings.trace.model.callable is not None
    if other or set(sample) != {"input_ids", "labels"}:
        return None
    return token_stream(data.source, data.column, data.tokenizer, vocabulary=vocabulary_size(model))


def _made(settings: Settings, sample: Any) -> UserBatches | None:
    """Return the batches of `train.data.callable`."""
    function = settings.train.data.callable
    if function is None:
        return None
    return UserBatches(function, settings.train.seed, sample, torch.device(settings.trace.device))
