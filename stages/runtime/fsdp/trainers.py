"""Tells libraries that wrap models for several ranks that a model is sharded already."""

from __future__ import annotations

from typing import Any

from torch import nn


def tell_transformers(model: nn.Module, ranks: int) -> None:
    """Mark a model of `transformers` as one that owns its placement and the reduction of its gradients.

    Its Trainer, also under `accelerate launch`, then neither wraps the model in DDP nor shards it again. Releases that
    do not know such models have no such mark.
    """
    base = _transformers_model(model)
    if base is None:
        return
    from transformers.distributed import DistributedConfig

    base._is_distributed_loading_by_transformers = True
    base.config.distributed_config = DistributedConfig(fsdp_size=ranks, dp_replicate_size=1)


def _transformers_model(model: nn.Module) -> Any:
    """Return the outermost model of `transformers`, inside an adapter perhaps; None if there is none."""
    known = (m for m in model.modules() if hasattr(type(m), "is_distributed_loading_by_transformers"))
    return next(known, None)
