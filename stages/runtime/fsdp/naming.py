"""Hands the collectives of `collectives` to the groups of a model that `fully_shard` has sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from stowage.stages.ir.parallel import ParameterGroup
from stowage.stages.runtime.fsdp.collectives import AllGather, ReduceScatter
from stowage.stages.runtime.fsdp.gloo import GlooAllGather, GlooReduceScatter
from stowage.stages.runtime.sharding.failures import Failures, listed

# Methods that versions of PyTorch before 2.8 lack: there errors have no names, and memory stays a little longer.
WANTED = ("set_custom_all_gather", "set_custom_reduce_scatter")


def name_collectives(
    model: nn.Module, groups: Sequence[ParameterGroup], process_group: Any, failures: Failures
) -> None:
    """Let what each group exchanges have its parameters' names; on gloo, its memory is freed in time too.

    Args:
        model: the sharded model.
        groups: its groups of parameters.
        process_group: the ranks.
        failures: what has been heard of ranks that are lost.
    """
    on_gloo = str(dist.get_backend(process_group)) == "gloo"
    gather, scatter = (GlooAllGather, GlooReduceScatter) if on_gloo else (AllGather, ReduceScatter)
    for group in groups:
        module: Any = model.get_submodule(group.modules[0])
        if all(hasattr(module, name) for name in WANTED):
            names = listed(group.parameters) or "parameters that forward does not read"
            module.set_custom_all_gather(gather(failures, f"the gather of {names}"))
            module.set_custom_reduce_scatter(scatter(failures, f"the scatter of the gradients of {names}"))
