"""Commands and functions that people use.

In a script: `fit`, `best_batch`, `curve` and `TrainingStep`; `shard` for several ranks; `stow` for a Hugging Face
Trainer. From a shell, as the command `stowage` or as `python -m stowage.flows.NAME`: `init`, `plan`, `train`, `show`,
`report`, `compare`, `batch_size`, `step_curve`, `device`, `benchmark` and `gpu`; `plan` and `train` are Prefect
deployments too.

- `api/`: the functions that scripts import.
- `cli/`: the console command `stowage`.
- `starter/`: writes the files of a new project.
- `pipeline/`: runs the stages with DVC, Git and Prefect.
- `planning/`: runs the planning stages in one process.
- `comparison/`: compares two plans of a project.
- `benchmarks/`: measures what the documents claim.
- `init.py`, `plan.py`, `train.py`, `show.py`, `report.py`, `compare.py`, `batch_size.py`, `step_curve.py`, `device.py`,
  `benchmark.py`, `gpu.py`: one command each.
"""

from typing import TYPE_CHECKING

from stowage.flows.api.public import find as __getattr__  # noqa: F401 - the module's own

if TYPE_CHECKING:
    from stowage.flows.api.best_batch import best_batch
    from stowage.flows.api.curve import curve
    from stowage.flows.api.fit import fit
    from stowage.flows.api.freeze import Freeze
    from stowage.flows.api.offload import Offload
    from stowage.flows.api.shard import shard
    from stowage.flows.api.sharding.plan import ShardPlan
    from stowage.flows.api.trainer.trainer import stow
    from stowage.flows.api.training_step import TrainingStep
    from stowage.flows.planning.batch_sizes import BatchChoice
    from stowage.stages.ir.lossy import Lossy
    from stowage.stages.runtime.masters import MasterWeights

__all__ = [
    "BatchChoice",
    "Freeze",
    "Lossy",
    "MasterWeights",
    "Offload",
    "ShardPlan",
    "TrainingStep",
    "best_batch",
    "curve",
    "fit",
    "shard",
    "stow",
]
