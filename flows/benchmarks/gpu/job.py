"""Defines what is trained on the machine with the GPU, and the parts from which every contestant makes it.

Like all files of this folder except `plan.py`, it needs only torch, transformers, pyarrow and safetensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from stowage.stages.runtime.files.weights import parameters_on_meta, stand_ins
from stowage.stages.workload.data import PYDOC_TOPICS, batch_at, token_stream
from stowage.stages.workload.models import build_model
from stowage.stages.workload.optimizers import optimizer_factory

CUBLAS_SETTING, CUBLAS_REPEATS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Setting with which matrix products repeat bit for bit."""


@dataclass(frozen=True)
class GpuJob:
    """One training configuration and its limits; `job.json` among what is carried between machines.

    Attributes:
        architecture: architecture of the model, see `build_model`.
        overrides: overrides of its configuration, see `build_model`.
        batch_size: samples of every batch.
        sequence_length: tokens of every sample.
        dtype: type of weights, gradients and states: `float32` or `bfloat16`.
        optimizer: name of the optimizer, see `optimizer_factory`.
        settings: its settings, see `optimizer_factory`.
        device: `cuda`; `cpu` runs the same path without a GPU.
        limit_bytes: bytes that a process may take on the device.
        host_bytes: bytes of the lower tier: pinned memory, on `cpu` the disk.
        seed: seed of weights and data.
        strict: use kernels that repeat bit for bit (see `strictly`), in tracing and measuring too.
    """

    architecture: str
    overrides: dict[str, Any]
    batch_size: int
    sequence_length: int
    dtype: str
    device: str
    limit_bytes: int
    host_bytes: int
    optimizer: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-4, "fused": True})
    seed: int = 0
    strict: bool = False

    def name(self) -> str:
        """Return a name for people."""
        strict = ", strict" if self.strict else ""
        sizes = f"{self.batch_size} × {self.sequence_length}"
        return f"{self.architecture}, {self.dtype}, {sizes}, {self.optimizer}{strict}"

    def make_optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Make the optimizer of these parameters."""
        return optimizer_factory(self.optimizer, self.settings)(list(parameters))

    def batch(self, iteration: int) -> dict[str, torch.Tensor]:
        """Return the batch of an iteration, on the device."""
        made = batch_at(_text(), self.batch_size, self.sequence_length, self.seed, iteration)
        return {name: tensor.to(self.device) for name, tensor in made.items()}


@cache
def _text() -> torch.Tensor:
    return token_stream(PYDOC_TOPICS)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_shell(job: GpuJob, layers: int | None = None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build the model without weights: parameters hold nothing, buffers are on the device.

    Args:
        job: the configuration.
        layers: number of layers, instead of the model's own.

    Returns:
        The model, and name -> the parameter's layout on the meta device.
    """
    overrides = job.overrides | ({"num_hidden_layers": layers} if layers is not None else {})
    with parameters_on_meta(), _default_dtype(getattr(torch, job.dtype)):
        model = build_model(job.architecture, overrides, seed=job.seed)
    layouts = stand_ins(model, job.device)
    return model.to(job.device), layouts


def parameters_of(job: GpuJob) -> int:
    """Return how many numbers the model has; nothing is put on the device."""
    return sum(p.numel() for p in build_shell(replace(job, device="cpu"))[0].parameters())


def layers_of(job: GpuJob) -> int:
    """Return how many layers the model has; nothing is put on the device."""
    if "num_hidden_layers" in job.overrides:
        return int(job.overrides["num_hidden_layers"])
    model, _ = build_shell(replace(job, device="cpu"))
    return int(getattr(model, "config").num_hidden_layers)  # noqa: B009 - a module's attribute, for mypy


def first_weights(job: GpuJob, layouts: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield initial weights on the device one by one, the same for every contestant.

    They are normal numbers of standard deviation 0.02, ones for the weights of normalisations, zeros for biases.
    """
    for index, (name, like) in enumerate(layouts.items()):
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=job.device)
        if like.dim() > 1:
            generator = torch.Generator(job.device).manual_seed(1_000_003 * job.seed + index)
            made.normal_(0.0, 0.02, generator=generator)
        else:
            made.fill_(1.0 if name.endswith("weight") else 0.0)
        yield name, made


def fill(job: GpuJob, model: nn.Module, layouts: dict[str, torch.Tensor], place: str) -> None:
    """Give the parameters of a shell their weights, in memory on `place`."""
    parameters = dict(model.named_parameters())
    for name, tensor in first_weights(job, layouts):
        parameters[name].data = tensor.to(place)


def limit_memory(job: GpuJob, limit_bytes: int | None = None) -> None:
    """Hold this process to a limit, by default the job's, if the device has a way to."""
    if job.device == "cuda":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        wanted = job.limit_bytes if limit_bytes is None else limit_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, wanted / total))


@contextlib.contextmanager
def strictly(strict: bool = True) -> Iterator[None]:
    """Use kernels that repeat bit for bit, where PyTorch has them; others raise.

    Enter it before anything else in a process: cuBLAS reads its setting once.
    """
    if not strict:
        yield
        return
    os.environ.setdefault(CUBLAS_SETTING, CUBLAS_REPEATS)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
