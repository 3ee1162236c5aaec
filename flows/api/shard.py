"""Shards a model over the ranks of a process group, as its plan says, with PyTorch's own engine: `shard`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from stowage.flows.api.arguments import check_arguments, check_at_hand, check_objective
from stowage.flows.api.reasons import tensors_text
from stowage.flows.api.several_ranks import facts_of, rounding_of_shards
from stowage.flows.api.sharding.choose import Situation, choose
from stowage.flows.api.sharding.given import in_order
from stowage.flows.api.sharding.machine import host_memory, parallel_machine
from stowage.flows.api.sharding.plan import ShardPlan
from stowage.flows.api.sharding.precision import check_policy
from stowage.flows.api.sharding.profile import profile_groups
from stowage.flows.planning.effort import stores_folder, target_device
from stowage.stages.ir.errors import ParameterError, TraceError
from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.optimizers import on_shards, why_not_elementwise
from stowage.stages.runtime.fsdp.apply import apply_choices
from stowage.stages.runtime.fsdp.buffers import share_buffers
from stowage.stages.runtime.fsdp.optimizer import check_states, give_shards
from stowage.stages.runtime.fsdp.ranks import all_succeed, begin_alike, from_first, same_weights
from stowage.stages.runtime.fsdp.trainers import tell_transformers
from stowage.stages.runtime.fsdp.trial import why_not_as_dtensors
from stowage.stages.runtime.fsdp.untouched import untouched
from stowage.stages.runtime.sharding.ranks import Ranks, own_group
from stowage.stages.settings.sizes import parse_bytes
from stowage.stages.workload import batch_signature
from stowage.stages.workload.calls import Loss, Objective

Choose = Callable[[Sequence[ParameterGroup], ParallelMachine, int, int], Sequence[GroupChoice]]
"""Chooses a state for each group, given the budgets of a device and of the host in bytes."""


AGAIN = "start all ranks again and go on from your last checkpoint"
"""What is to be done where ranks are lost."""

UNSEEN_BYTES = 384 << 10
"""Bytes that a plan counts for what no trace shows: tensors that Python still refers to, and the engine's numbers."""


def shard(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_budget: str | int,
    host_budget: str | int | None = None,
    loss: Loss | None = None,
    forward: Objective | None = None,
    accumulate: int = 1,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    choices: Choose | None = None,
    costs: Literal["measured", "roofline"] = "roofline",
    prefetch: int | None = None,
    broadcast_buffers: bool = True,
    mixed_precision: MixedPrecisionPolicy | None = None,
    cache_dir: str | Path | None = None,
) -> ShardPlan:
    """Shard a model and its optimizer in place over several ranks, so that each rank's step fits its device.

    All ranks call it with the same model, optimizer and form of batch, each with its own data. The first rank plans for
    all. The model stays the same object with plain modules in it, whose parameters are now shards (`DTensor`); a loop
    of your own goes on as it is.

    Args:
        model: a model in the mode it trains in; ranks whose weights differ get the first rank's, as under DDP.
        batch: a sample of what this rank trains on; see `fit`.
        optimizer: an optimizer of the model's parameters; the object stays the same.
        device_budget: what each rank may use of its device: a size, or bytes.
        host_budget: what all ranks together may use of the host; what is free there if None.
        loss: see `fit`.
        forward: see `fit`; instead of `loss`.
        accumulate: forwards and backwards before an update, each of a batch like this one, whose gradients are reduced
            and added up. With `set_requires_gradient_sync(False)` whole gradients wait instead, which is not counted.
        group: the ranks; all ranks of the default group if None, or this process alone where there is none.
        mesh: the ranks as a mesh of one dimension, instead of `group`.
        choices: chooses the state of each group of parameters, instead of the plan's own choice.
        costs: `measured` runs each distinct call of the model first; `roofline` estimates them.
        prefetch: groups that are gathered ahead of their use; if None, one on GPUs, and none on a CPU.
        broadcast_buffers: give all ranks the first rank's buffers before forwards, as DDP does: before each but those
            between micro-batches that are reduced together, and those that follow one without gradients.
        mixed_precision: FSDP2's own policy, for all groups: weights stay and are updated in the type that they are
            stored in, and are gathered and computed with in `param_dtype`; gradients are reduced in `reduce_dtype`; the
            model's outputs are of `output_dtype`. One rank on which everything fits has it too, through `fully_shard`.
            None for the stored type.
        cache_dir: folder of what was measured; see `fit`.

    Returns:
        The plan, equal on all ranks; `print(plan)` says what it does.

    Raises:
        ParameterError: an argument is wrong, the ranks do not have the same, or the model cannot be sharded. Model and
            optimizer are as before.
        Infeasible: nothing fits the budgets.
        TraceError: the step cannot be traced.
    """
    check_arguments(model=model, optimizer=optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    here = _Here.of(model, group, mesh)

    def describe() -> dict[str, str]:
        check_arguments(
            device_budget=device_budget, host_budget=host_budget, loss=loss, forward=forward, accumulate=accumulate
        )
        check_objective(loss, forward)
        check_policy(mixed_precision)
        asked = {
            "device_budget": device_budget,
            "host_budget": host_budget,
            "prefetch": prefetch,
            "accumulate": accumulate,
            "broadcast_buffers": broadcast_buffers,
            "mixed_precision": mixed_precision,
        }
        form = {"tensor in the batch": tensors_text(batch_signature(batch))}
        return {**facts_of(model, optimizer), **form, **{name: repr(value) for name, value in asked.items()}}

    begin_alike(describe, lambda: _check(model, optimizer, names), here.ranks)
    stores = stores_folder(cache_dir)
    budget = parse_bytes(device_budget, "device_budget")
    host = host_memory() if host_budget is None else parse_bytes(host_budget, "host_budget")
    ahead = prefetch if prefetch is not None else int(here.device.type != "cpu")
    machine = parallel_machine(
        target_device(here.device, stores),
        here.ranks,
        here.device,
        device_bytes=budget,
        host_bytes=host,
        stores=stores,
    )

    def make() -> str:
        profile = profile_groups(
            model,
            batch,
            stores=stores,
            loss=loss,
            forward=forward,
            optimizer=optimizer,
            costs=costs,
            mixed_precision=mixed_precision,
        )
        on_cpu = here.device.type == "cpu"
        resident_bytes = profile.resident_bytes + UNSEEN_BYTES
        situation = Situation(
            profile.groups, machine, budget, host, resident_bytes, ahead, on_cpu, micro_batches=accumulate
        )
        if choices is None:
            return ShardPlan.of(situation, choose(situation), mixed_precision).to_json()
        given = in_order(choices(profile.groups, machine, budget - resident_bytes, host), profile.groups)
        return ShardPlan.of(situation, situation.describe("given", given), mixed_precision).to_json()

    plan = ShardPlan.from_json(make() if here.ranks is None else from_first(make, here.ranks, "the plan of rank 0"))
    begin_alike(lambda: {"plan": plan.content_hash}, lambda: None, here.ranks)
    if plan.whole:
        return plan
    with here.present() as (ranks, over):
        notice = from_first(lambda: _notice(optimizer), ranks, "a notice of rank 0") if ranks.count > 1 else ""

        def work() -> None:
            apply_choices(
                model,
                plan.groups,
                plan.choices,
                over,
                ranks.failures,
                prefetch=plan.prefetch,
                mixed_precision=plan.mixed_precision,
            )
            if optimizer is not None:
                give_shards(optimizer, names, model)

        all_succeed(lambda: _check_cut(model, optimizer, over), ranks)
        dropped = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        with same_weights(model, ranks), untouched(model, optimizer):
            all_succeed(work, ranks)
        if broadcast_buffers and ranks.count > 1:
            share_buffers(model, ranks)
        tell_transformers(model, ranks.count)
        if notice and not ranks.rank:
            warnings.warn(notice, stacklevel=2)
        if dropped:
            warnings.warn(_lost(dropped), stacklevel=2)
    return plan


def _check(model: nn.Module, optimizer: torch.optim.Optimizer | None, names: dict[int, str]) -> None:
    check_at_hand(model)
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise ParameterError("The model is sharded already: call shard once, on the whole model.")
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ParameterError(
                f"Parameter {name} is a single number without dimensions, which fully_shard cannot cut: give it the "
                "shape (1,)."
            )
    if optimizer is None:
        return
    check_states(optimizer, names)
    if reason := why_not_elementwise(optimizer):
        raise ParameterError(
            f"{type(optimizer).__name__} cannot update shards as it updates whole parameters: {reason}. Take one that "
            "goes element by element, such as AdamW, SGD or Lion."
        )


def _check_cut(model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: DeviceMesh) -> None:
    """Refuse what `fully_shard` cannot cut, or an optimizer cannot step then."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.numel():
            raise ParameterError(
                f"Parameter {name} of shape {tuple(parameter.shape)} has no elements, and fully_shard cannot reduce "
                "its gradient: take it out of the model, make it a buffer, or train with fit and group."
            )
        if not parameter.is_contiguous():
            raise ParameterError(
                f"Parameter {name} of shape {tuple(parameter.shape)} lies in memory with strides {parameter.stride()}, "
                "and fully_shard cuts only what lies in order: make it contiguous (for a whole model "
                "`model.to(memory_format=torch.contiguous_format)`), or train with fit and group."
            )
    if optimizer is not None and (reason := why_not_as_dtensors(optimizer, mesh)):
        raise ParameterError(
            f"{type(optimizer).__name__} cannot step the shards that fully_shard makes ({reason}): take another "
            "optimizer, such as AdamW, SGD or Lion, or train with fit and group."
        )


def _notice(optimizer: torch.optim.Optimizer | None) -> str:
    """Return what is to be said of an optimizer whose last bits depend on how tensors are cut."""
    if optimizer is None:
        return ""
    try:
        return rounding_of_shards(optimizer) if on_shards(optimizer).rounds else ""
    except TraceError:  # it cannot be copied, and so cannot be tried
        return ""


def _lost(names: Sequence[str]) -> str:
    """Return what is to be said of gradients that were there, which shards of parameters do not have."""
    more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"The gradient of parameter '{names[0]}'{more} is dropped, as its parameter is a shard now: call "
        "`optimizer.zero_grad()` before shard, or shard before the first backward of an update."
    )


@dataclass(frozen=True)
class _Here:
    """The ranks that share the model, and this one's place.

    Attributes:
        ranks: all of them; None for this process alone.
        mesh: the same as a mesh, where it is known.
        device: where this rank computes.
    """

    ranks: Ranks | None
    mesh: DeviceMesh | None
    device: torch.device

    @staticmethod
    def of(model: nn.Module, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> _Here:
        kind = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")
        if mesh is not None:
            if group is not None:
                raise ParameterError("group and mesh name the same ranks: give one of them.")
            if mesh.ndim != 1:
                raise ParameterError(f"mesh has {mesh.ndim} dimensions: give one of one dimension, for the shards.")
            return _Here(Ranks(mesh.get_group(), AGAIN), mesh, _here(mesh.device_type))
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return _Here(None, None, _here(kind))
        group = own_group(group) if group is not None else dist.distributed_c10d._get_default_group()
        if "nccl" in dist.get_backend(group) and torch.cuda.is_available():
            kind = "cuda"
        return _Here(Ranks(group, AGAIN), DeviceMesh.from_group(group, kind), _here(kind))

    @contextmanager
    def present(self) -> Iterator[tuple[Ranks, DeviceMesh]]:
        """Yield these ranks; a process alone starts a group of its own, which ends if the block raises."""
        if self.ranks is not None and self.mesh is not None:
            yield self.ranks, self.mesh
            return
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh(self.device.type, (1,))
            yield Ranks(mesh.get_group(), AGAIN), mesh
        except BaseException:
            dist.destroy_process_group()
            raise


def _here(kind: str) -> torch.device:
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")
