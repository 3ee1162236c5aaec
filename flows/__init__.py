"""What people run: `fit`, `best_batch` and `curve` in a script, `stow` on a Hugging Face Trainer; `plan`, `train`,
`batch_size`, `curve`, `report`, `benchmark` and `compare` from a shell or as deployments."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stowage.flows.api.best_batch import best_batch
    from stowage.flows.api.curve import curve
    from stowage.flows.api.fit import fit
    from stowage.flows.api.offload import Offload
    from stowage.flows.api.trainer.trainer import stow
    from stowage.flows.api.training_step import TrainingStep
    from stowage.flows.planning.batch_sizes import BatchChoice
    from stowage.stages.runtime.masters import MasterWeights

__all__ = ["BatchChoice", "MasterWeights", "Offload", "TrainingStep", "best_batch", "curve", "fit", "stow"]

_HOME = {
    "BatchChoice": "stowage.flows.planning.batch_sizes",
    "MasterWeights": "stowage.stages.runtime.masters",
    "Offload": "stowage.flows.api.offload",
    "TrainingStep": "stowage.flows.api.training_step",
    "best_batch": "stowage.flows.api.best_batch",
    "curve": "stowage.flows.api.curve",
    "fit": "stowage.flows.api.fit",
    "stow": "stowage.flows.api.trainer.trainer",
}


def __getattr__(name: str) -> Any:
    """Import torch only when `fit` is asked for: flows that only orchestrate start faster."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
