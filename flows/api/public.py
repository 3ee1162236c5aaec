"""Maps the names that people import from `stowage` and `stowage.flows` to the modules that define them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULE_OF = {
    "BatchChoice": "stowage.flows.planning.batch_sizes",
    "Freeze": "stowage.flows.api.freeze",
    "Lossy": "stowage.stages.ir.lossy",
    "MasterWeights": "stowage.stages.runtime.masters",
    "Offload": "stowage.flows.api.offload",
    "ShardPlan": "stowage.flows.api.sharding.plan",
    "TrainingStep": "stowage.flows.api.training_step",
    "best_batch": "stowage.flows.api.best_batch",
    "curve": "stowage.flows.api.curve",
    "fit": "stowage.flows.api.fit",
    "shard": "stowage.flows.api.shard",
    "stow": "stowage.flows.api.trainer.trainer",
}


def find(name: str) -> Any:
    """Import a public name; torch is imported only then, so that commands start fast.

    Raises:
        AttributeError: there is no such name.
    """
    if name in MODULE_OF:
        return getattr(import_module(MODULE_OF[name]), name)
    raise AttributeError(f"module 'stowage' has no attribute {name!r}")
