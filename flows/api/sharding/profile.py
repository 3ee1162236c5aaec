"""Profiles the groups of parameters of a model, which need not be in memory: Elixir's pre-runtime profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from stowage.flows.api.sharding.precision import StoredStates, as_computed, as_stored
from stowage.flows.api.sharding.repeat import repeat_rows
from stowage.flows.planning.effort import target_device
from stowage.stages.device import unique_bytes
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import TraceError
from stowage.stages.ir.parallel import ParameterGroup
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition.group_members import ROOT, Groups
from stowage.stages.partition.parameter_groups import Modules, parameter_groups
from stowage.stages.profile import CostStore, profile_variants
from stowage.stages.runtime.files.weights import stand_ins
from stowage.stages.structure import tensors_of
from stowage.stages.trace import Recorded, record_step, with_updates
from stowage.stages.workload.called import Called
from stowage.stages.workload.calls import Loss, Objective
from stowage.stages.workload.repeated import (
    Repeated,
    checkpointed_segments,
    collected_parameters,
    group_candidates,
    owners_of,
    repeated_lists,
    with_first_blocks,
)

ROUNDS = 3
"""Most traces until the modules whose inputs are cast are those that turn out to be groups."""


@dataclass(frozen=True)
class Profile:
    """What a model's groups take, and what is in memory beside them.

    Attributes:
        groups: the groups, the model's own first.
        resident_bytes: bytes of buffers and of the batch.
        traced: number of blocks that were traced of each repeated list, by its path.
        trace_s: time of tracing.
        profile_s: time of everything after it.
    """

    groups: tuple[ParameterGroup, ...]
    resident_bytes: int
    traced: Mapping[str, int]
    trace_s: float = 0.0
    profile_s: float = 0.0


def profile_groups(
    model: nn.Module,
    batch: Any,
    *,
    stores: Path,
    loss: Loss | None = None,
    forward: Objective | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    costs: Literal["measured", "roofline"] = "roofline",
    target: DeviceDescription | None = None,
    few: bool = True,
    mixed_precision: MixedPrecisionPolicy | None = None,
) -> Profile:
    """Trace the model, with the first blocks of its repeated lists alone, and describe its groups.

    Args:
        model: a model in memory, on fake tensors, or built under `torch.device("meta")`; it is as before afterwards.
        batch: see `fit`.
        stores: folder of stored costs.
        loss: see `fit`.
        forward: see `fit`.
        optimizer: an optimizer of the model's parameters; None for groups without states.
        costs: `measured` runs each distinct call on this device; `roofline` estimates it for `target`.
        target: the device; this machine's if None.
        few: trace a few blocks of a repeated list and write the rows of all from them; False traces all blocks.
        mixed_precision: the policy under which `fully_shard` casts weights, inputs and gradients; None for none.

    Raises:
        TraceError: the step cannot be traced.
    """
    lists = repeated_lists(model) if few else []
    device = _device_of(model, batch)
    how = _Costing(target or target_device(device, stores), CostStore(stores / "costs"), costs)
    with _present(model, optimizer, device) as layouts:
        step = _Step(model, batch, loss, forward, optimizer, layouts, mixed_precision)
        if lists:
            try:
                return _of_few(step, how, lists)
            except TraceError:
                pass  # a model that counts its blocks
        traced = step.trace()
        started = time.perf_counter()
        rows = step.stored(how.rows(traced))
        return Profile(tuple(rows), step.resident_bytes(), {}, traced.elapsed_s, time.perf_counter() - started)


def _of_few(step: _Step, how: _Costing, lists: Sequence[Repeated]) -> Profile:
    kept = {lst.path: lst.least for lst in lists}
    with with_first_blocks(step.model, kept):
        traced = step.trace()
    started = time.perf_counter()
    rows = repeat_rows(step.stored(how.rows(traced)), lists, kept)
    return Profile(tuple(rows), step.resident_bytes(), kept, traced.elapsed_s, time.perf_counter() - started)


@dataclass(frozen=True)
class _Traced:
    trace: TraceTables
    modules: Modules
    elapsed_s: float


@dataclass(frozen=True)
class _Step:
    """The step that is traced."""

    model: nn.Module
    batch: Any
    loss: Loss | None
    forward: Objective | None
    optimizer: torch.optim.Optimizer | None
    layouts: Mapping[str, torch.Tensor]
    policy: MixedPrecisionPolicy | None

    def trace(self) -> _Traced:
        started = time.perf_counter()
        if self.policy is None:
            recorded, called = self._record(self.layouts)
            trace = with_updates(recorded, self.model, optimizer=self.optimizer)
            return _Traced(trace, self._modules(called), time.perf_counter() - started)
        casting = group_candidates(self.model, dict.fromkeys(path for path, _ in self.model.named_modules()))
        known = StoredStates(self.optimizer) if self.optimizer is not None else None
        for _ in range(ROUNDS):
            with as_computed(self.model, self.policy, casting) as cast:
                recorded, called = self._record({**self.layouts, **cast})
            trace, modules = with_updates(recorded, self.model, optimizer=known), self._modules(called)
            groups = tuple(path for path in Groups(trace, modules).order if path != ROOT)
            if set(groups) == set(casting) & called.paths.keys():
                break
            casting = groups
        return _Traced(trace, modules, time.perf_counter() - started)

    def _record(self, layouts: Mapping[str, torch.Tensor]) -> tuple[Recorded, Called]:
        called = Called(self.model)
        names = {name for name, _ in self.model.named_parameters()}
        with called.noting():
            recorded = record_step(
                self.model,
                self.batch,
                loss=self.loss,
                objective=self.forward,
                layouts={name: layout for name, layout in layouts.items() if name in names},
                merges=self.policy is None,  # a mask is cast for each block that reads it
            )
        return recorded, called

    def _modules(self, called: Called) -> Modules:
        return Modules(
            group_candidates(self.model, called.paths),
            owners_of(self.model),
            checkpointed_segments(self.model),
            collected_parameters(self.model),
            frozenset(called.taking),
            frozenset(called.returning),
            tuple(path for path, _ in self.model.named_modules()),
        )

    def stored(self, rows: Sequence[ParameterGroup]) -> list[ParameterGroup]:
        """Return rows of groups with what is stored, where that is of another type than what is computed with."""
        return [
            as_stored(row, self.model, self.policy, self.optimizer) if self.policy is not None else row for row in rows
        ]

    def resident_bytes(self) -> int:
        return unique_bytes([*self.model.buffers(), *tensors_of(self.batch)])


@dataclass(frozen=True)
class _Costing:
    target: DeviceDescription
    store: CostStore
    costs: Literal["measured", "roofline"]

    def rows(self, traced: _Traced) -> list[ParameterGroup]:
        known = profile_variants([traced.trace], self.target, self.store, costs=self.costs)
        return parameter_groups(traced.trace, {c.signature: c for c in known}, traced.modules)


@contextmanager
def _present(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Put stand-ins on `device` in place of parameters and buffers that are on the meta device, as long as the block.

    Yields:
        The layouts of the stand-ins.
    """
    held = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    groups = [list(g["params"]) for g in optimizer.param_groups] if optimizer is not None else []
    before = dict(model.named_parameters())
    try:
        layouts = stand_ins(model, device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        if optimizer is not None:
            after = dict(model.named_parameters())
            new = {id(old): after[name] for name, old in before.items()}
            for group in optimizer.param_groups:
                group["params"] = [new.get(id(p), p) for p in group["params"]]
        yield layouts
    finally:
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        if optimizer is not None:
            for group, parameters_before in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters_before


def _device_of(model: nn.Module, batch: Any) -> torch.device:
    tensors = [*model.parameters(), *tensors_of(batch)]
    return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))
