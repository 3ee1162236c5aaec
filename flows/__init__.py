"""What people run.

In a script: `fit`, `best_batch`, `curve` and `TrainingStep`; `stow` for a Hugging Face Trainer. From a shell, as the
command `stowage` or as `python -m stowage.flows.NAME`: `init`, `plan`, `train`, `show`, `report`, `compare`,
`batch_size`, `step_curve`, `device`, `benchmark` and `gpu`; `plan` and `train` are Prefect deployments too.

Folders: `api` (what is imported), `cli` (the command), `starter` (files of a new project), `pipeline` (DVC, Git and
Prefect), `planning` (the stages in one process), `comparison` (two plans) and `benchmarks`.
"""

from typing import TYPE_CHECKING

from stowage.flows.api.public import find as __getattr__  # noqa: F401 - the module's own

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
