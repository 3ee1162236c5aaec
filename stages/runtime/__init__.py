"""Runs plans. Generated code imports `Iteration` alone, which says what a step sees and calls.

- `executors/`: how plans are executed; `bind` and `program` make one plan's code a program that runs.
- `offload/`: what is below the device, and how it goes there and comes back.
- `updates`, `clipping`, `masters`: what the optimizer does, parameter by parameter.
- `random/`: random states, so that what runs again draws what it drew before.
- `shadow/`: the comparison with plain PyTorch.
- `observe/`: memory and time of an iteration.
- `files/`: tensors in files.
- `whitelist`, `dispatch`: what generated code may consist of, and what PyTorch does while it runs.
"""

from __future__ import annotations

from stowage.stages.runtime.executors.verbs import Iteration
from stowage.stages.runtime.program import Program
from stowage.stages.runtime.random.randomness import RandomStates
from stowage.stages.runtime.updates import PerParameterUpdates

__all__ = ["Iteration", "PerParameterUpdates", "Program", "RandomStates"]
