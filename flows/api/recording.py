"""Traces training steps that are new or have changed."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from stowage.flows.api.binding import Binding
from stowage.flows.api.interrupt import ends_in_one_line
from stowage.flows.api.steps import Say, Steps
from stowage.flows.planning.progress import Watch
from stowage.stages.structure.generators import forked_generators
from stowage.stages.trace import Recorded, record_step


class Recording:
    """Records forward and backward of one model.

    Attributes:
        decisions: what tensors' values decided in the latest step that left something in the user's objects.
        traced_s: seconds that the latest trace took.
        untold_s: seconds of tracing that no notice has stated yet.
    """

    def __init__(self, model: nn.Module, steps: Steps, watch: Watch, say: Say) -> None:
        self._model = model
        self._steps = steps
        self._watch = watch
        self._say = say
        self.decisions: tuple[bool, ...] = ()
        self.traced_s = self.untold_s = 0.0

    def record(self, batch: Any, binding: Binding) -> Recorded:
        """Trace forward and backward on a batch.

        Args:
            batch: a batch of the form wanted.
            binding: knows the offloaded parameters and their layouts.

        Raises:
            TraceError: the step cannot be traced.
        """
        began = time.perf_counter()
        watch = self._watch
        with (
            forked_generators(),
            binding.tracing(),
            ends_in_one_line(watch, self._say),
            watch.shown(),
        ):
            watch("trace")
            recorded = record_step(
                self._model,
                batch,
                loss=self._steps.loss,
                objective=self._steps.objective,
                layouts=binding.layouts(),
                decisions=self.decisions,
                touches=self._steps.touches,
                freezes=self._steps.units is not None,
            )
        for notice in recorded.notices:
            self._say(notice)
        self.traced_s = self.untold_s = time.perf_counter() - began
        return recorded
