"""Trains a job of the machine with the GPU under plans by rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stowage.flows.benchmarks.gpu.job import GpuJob, build_shell, fill, first_weights
from stowage.flows.benchmarks.gpu.measure import trace_job
from stowage.flows.planning.by_rules import MOVABLE_BYTES, RulePlan, Rules
from stowage.stages.device.tiers import Tier
from stowage.stages.runtime.executors.single import SingleDevice


class TracedJob(Rules):
    """A job's step, traced on tensors without memory.

    Attributes:
        job: the job that was traced.
    """

    def __init__(self, job: GpuJob, *, max_grad_norm: float | None = None, movable_bytes: int = MOVABLE_BYTES) -> None:
        """Trace the step.

        Args:
            job: the configuration.
            max_grad_norm: the norm to clip gradients to, or None.
            movable_bytes: see `MOVABLE_BYTES`.

        Raises:
            TraceError: the model cannot be traced.
        """
        super().__init__(trace_job(job, max_grad_norm), movable_bytes=movable_bytes)
        self.job = job


class ByRules:
    """A job's model trained under a plan by rules; its weights are made one by one where the plan keeps them."""

    def __init__(self, traced: TracedJob, plan: RulePlan, tier: Tier | None = None) -> None:
        """Build the model and bind the plan; `tier` holds the slots, and the caller closes it."""
        job = traced.job
        self.model, layouts = build_shell(job)
        self.optimizer = job.make_optimizer(self.model.parameters())
        executor = SingleDevice(self.model, self.optimizer, (lambda: tier) if tier is not None else None)
        executable = traced.executable(plan)
        self.offloading = executor.open(executable)
        if self.offloading is not None:
            self.offloading.populate(first_weights(job, layouts), plan.slots)
        else:
            fill(job, self.model, layouts, job.device)
        self.program = executor.bind(executable)

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one iteration."""
        return self.program(batch)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all weights, copied to host memory; everything is on the device afterwards."""
        if self.offloading is not None:
            self.offloading.fetch_all()
        return weights_of(self.model)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's parameters in host memory, by name."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
