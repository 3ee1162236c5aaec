"""Trains like peers: what people use today, each on the same model, weights and batches."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

from stowage.flows.benchmarks.gpu.job import GpuJob, build_shell, fill
from stowage.flows.benchmarks.gpu.pinned import Pinned
from stowage.stages.ir.errors import StowageError
from stowage.stages.runtime.observe.measure import measure_iteration
from stowage.stages.workload.calls import call_model, loss_of


class UnavailableError(StowageError):
    """Says why a peer cannot run here."""


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(call_model(model, batch), batch, None)


class Plain:
    """Plain PyTorch with everything on the device."""

    def __init__(self, job: GpuJob, layers: int | None = None) -> None:
        self.model, layouts = build_shell(job, layers)
        fill(job, self.model, layouts, job.device)
        self.optimizer = job.make_optimizer(self.model.parameters())

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one iteration: zero_grad, forward, backward, step."""
        self.optimizer.zero_grad()
        loss = _loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and weight of each parameter."""
        yield from self.model.named_parameters()

    def measured_peak(self, batch: Any) -> int:
        """Run one more iteration, and return its highest device bytes."""
        self.optimizer.zero_grad()
        return measure_iteration(self, self.model, self.optimizer, batch, []).peak_bytes


class HostOptimizer:
    """Gradient checkpointing on the device, and the optimizer on copies in host memory.

    Each gradient is copied to the host as soon as it is complete, the weights are copied back after the step.

    Attributes:
        pinned: counts what pinning host memory takes.
    """

    def __init__(self, job: GpuJob) -> None:
        self.pinned = Pinned()
        self.model, layouts = build_shell(job)
        fill(job, self.model, layouts, job.device)
        enable: Any = self.model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._on_card = job.device == "cuda"
        self._host: dict[nn.Parameter, nn.Parameter] = {}
        self._arrived: set[nn.Parameter] = set()
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            held = self._lower_tier(parameter)
            held.copy_(parameter.detach())
            self._host[parameter] = nn.Parameter(held)
            register: Any = parameter.register_post_accumulate_grad_hook
            register(self._take)
        self.optimizer = job.make_optimizer(self._host.values())

    def _lower_tier(self, like: torch.Tensor) -> torch.Tensor:
        if not self._on_card:
            return torch.empty(like.shape, dtype=like.dtype)
        return self.pinned.empty(like.numel() * like.element_size()).view(like.dtype).view(like.shape)

    def _take(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        host = self._host[parameter]
        if parameter in self._arrived:
            raise AssertionError("a gradient was completed twice in one backward")
        self._arrived.add(parameter)
        if host.grad is None:
            host.grad = self._lower_tier(parameter)
        host.grad.copy_(parameter.grad, non_blocking=True)
        parameter.grad = None

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one iteration."""
        self._arrived.clear()
        loss = _loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._on_card:
            torch.cuda.synchronize()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, host in self._host.items():
                parameter.copy_(host, non_blocking=True)
        return loss.detach()


class FullySharded:
    """FSDP2 with `CPUOffloadPolicy`, a group for each layer, `gradient_checkpointing_enable`; one process."""

    def __init__(self, job: GpuJob) -> None:
        if not distributed.is_available():
            raise UnavailableError("this PyTorch has no torch.distributed")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        cuda = job.device == "cuda"
        if not distributed.is_initialized():
            store: Any = vars(distributed)["HashStore"]()
            distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
        self.model, layouts = build_shell(job)
        fill(job, self.model, layouts, "cpu")
        enable: Any = self.model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mesh = init_device_mesh(job.device, (1,))
        policy = CPUOffloadPolicy(pin_memory=cuda)
        for layer in _layers(self.model):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(self.model, mesh=mesh, offload_policy=policy)
        self.optimizer = job.make_optimizer(self.model.parameters())

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one iteration."""
        self.optimizer.zero_grad()
        loss = _loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the longest list in the model: its layers."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UnavailableError(f"{type(model).__name__} has no list of layers to shard")
    return max(lists, key=len)


class DeepSpeed:
    """DeepSpeed's ZeRO with parameters (stage 3) and optimizer in host memory, and gradient checkpointing.

    With bfloat16 weights it keeps float32 masters: more bytes and other numbers than the other peers.
    """

    def __init__(self, job: GpuJob, stage: int = 3) -> None:
        try:
            import deepspeed
        except ImportError as error:
            raise UnavailableError(f"deepspeed cannot be imported ({error})") from error
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        backend = "nccl" if job.device == "cuda" else "gloo"
        deepspeed.init_distributed(
            backend, auto_mpi_discovery=False, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
        )
        model, layouts = build_shell(job)
        fill(job, model, layouts, "cpu" if stage == 3 else job.device)
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        place = {"device": "cpu", "pin_memory": job.device == "cuda"}
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": place}
        settings = {
            "train_micro_batch_size_per_gpu": job.batch_size,
            "bf16": {"enabled": job.dtype == "bfloat16"},
            "zero_optimization": zero | ({"offload_param": place} if stage == 3 else {}),
            "optimizer": {"type": job.optimizer, "params": {"lr": job.settings["lr"]}},
        }
        self._engine: Any = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one iteration."""
        loss = _loss(self._engine, batch)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()
