"""Stowage plans where every tensor of a PyTorch training step lives, so that training fits the memory you have.

`fit`, `best_batch`, `curve`, `shard` and `stow` are imported from here or from `stowage.flows`; torch is imported with
the first of them.

- `lookup.py`: finds the public names.
- `version.py`: states the version.
- `flows/`: commands and functions that people use.
- `stages/`: the stages of the pipeline, and what they share.
"""

from typing import TYPE_CHECKING

from stowage.lookup import find as __getattr__  # noqa: F401 - the module's own
from stowage.version import __version__

if TYPE_CHECKING:
    from stowage.flows import (
        BatchChoice,
        Freeze,
        Lossy,
        MasterWeights,
        Offload,
        ShardPlan,
        TrainingStep,
        best_batch,
        curve,
        fit,
        shard,
        stow,
    )

__all__ = [
    "BatchChoice",
    "Freeze",
    "Lossy",
    "MasterWeights",
    "Offload",
    "ShardPlan",
    "TrainingStep",
    "__version__",
    "best_batch",
    "curve",
    "fit",
    "shard",
    "stow",
]
