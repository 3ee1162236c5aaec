"""Shards each group of modules with `fully_shard`, in the state that a plan chose for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from stowage.stages.ir.parallel import GroupChoice, ParameterGroup
from stowage.stages.runtime.fsdp.naming import name_collectives
from stowage.stages.runtime.sharding.failures import Failures

ROOT = ""
"""Path of the model itself: its group holds what no other group does, tied weights among it."""


def apply_choices(
    model: nn.Module,
    groups: Sequence[ParameterGroup],
    choices: Sequence[GroupChoice],
    mesh: DeviceMesh,
    failures: Failures,
    *,
    prefetch: int = 1,
    mixed_precision: MixedPrecisionPolicy | None = None,
) -> None:
    """Shard the model in place over the ranks of `mesh`.

    Args:
        model: the whole model, with equal weights on all ranks.
        groups: the groups; one of them is the model itself, which is sharded last.
        choices: the state of each group.
        mesh: a mesh of one dimension; its type of device is where the model computes.
        failures: what has been heard of ranks of the mesh that are lost.
        prefetch: groups that are gathered ahead of their use; on a CPU, where a gather blocks, this costs memory and
            gains nothing, and 0 keeps each gather to its use.
        mixed_precision: the types in which all groups compute and reduce; the stored one if None. Its `output_dtype` is
            that of the model's outputs: what groups hand to each other stays as it is computed.
    """
    chosen = {choice.group: choice for choice in choices}
    of_root = {name for group in groups if ROOT in group.modules for name in group.parameters}
    ignored = {p for name, p in model.named_parameters() if name in of_root}
    policy = mixed_precision or MixedPrecisionPolicy()
    deepest_first = sorted(groups, key=lambda g: max(map(_depth, g.modules)), reverse=True)
    for group in deepest_first:
        choice = chosen[group.group]
        modules = [model.get_submodule(path) for path in group.modules]
        is_root = ROOT in group.modules
        fully_shard(
            modules if len(modules) > 1 else modules[0],  # type: ignore[call-overload]
            mesh=mesh,
            reshard_after_forward=not choice.keep,
            mp_policy=policy if is_root else replace(policy, output_dtype=None),
            offload_policy=_policy(choice, mesh),
            ignored_params=None if is_root else ignored & {p for m in modules for p in m.parameters()},
        )
    _set_prefetch(model, groups, prefetch)
    name_collectives(model, groups, mesh.get_group(), failures)


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _policy(choice: GroupChoice, mesh: DeviceMesh) -> OffloadPolicy:
    if not choice.on_host:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu" and torch.accelerator.is_available())


def _set_prefetch(model: nn.Module, groups: Sequence[ParameterGroup], ahead: int) -> None:
    """Let each group gather the next ones while it computes: in the order of use in forward, backwards in backward."""
    order = [_first(model, g) for g in sorted(groups, key=lambda g: g.group) if ROOT not in g.modules]
    for i, module in enumerate(order):
        # A list of the module itself asks for nothing; an empty list would ask for PyTorch's own choice.
        module.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + ahead] or [module])
        module.set_modules_to_backward_prefetch(order[max(0, i - ahead) : i][::-1] or [module])
    root = _first(model, next(g for g in groups if ROOT in g.modules))
    if ahead and order:
        root.set_modules_to_forward_prefetch(order[:ahead])
        root.set_modules_to_backward_prefetch(order[::-1][:ahead])
    else:
        root.set_modules_to_backward_prefetch([root])


def _first(model: nn.Module, group: ParameterGroup) -> FSDPModule:
    module = model.get_submodule(group.modules[0])
    assert isinstance(module, FSDPModule)
    return module
