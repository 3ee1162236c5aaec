"""Lists the files that the model and data of `params.yaml` are made of, and tells DVC of them in `dvc.yaml`.

`artifacts/inputs.yaml` is the generated list, `dvc.yaml` names each file of it among the deps of `trace` and `train`.
What parameters name is listed before anything runs; what the model imports is known once its step has been traced.

- `named`: files that parameters name.
- `recorded`: files that the process has imported or executed.
- `listing`: reads and writes the list and `dvc.yaml`.
- `mending`: brings both up to date, and says so.
- `origin`: what a trace was made from.
"""

from stowage.stages.inputs.listing import LIST, StaleInputsError, added_inputs, listed_inputs, state
from stowage.stages.inputs.mending import mend, refresh, require_listed
from stowage.stages.inputs.named import TRACE, TRAIN, named_inputs
from stowage.stages.inputs.recorded import ExecutedFiles, imported_files, look_in_src

__all__ = [
    "LIST",
    "TRACE",
    "TRAIN",
    "ExecutedFiles",
    "StaleInputsError",
    "added_inputs",
    "imported_files",
    "listed_inputs",
    "look_in_src",
    "mend",
    "named_inputs",
    "refresh",
    "require_listed",
    "state",
]
