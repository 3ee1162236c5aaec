"""Runs plans: loads a plan's generated step, binds it to a model and an optimizer, and carries out what the step calls.

- `executors/`: how plans are executed, and `Iteration`, the one type that generated code imports.
- `bind`: checks that a plan fits a model and makes a program of both.
- `program`: a loaded step, bound to a model and an optimizer.
- `offload/`: what is in the lower tier, and how it gets there and back.
- `sharding/`: one shard of each parameter on each rank, and what ranks exchange.
- `fsdp/`: sharding plans carried out by PyTorch's `fully_shard`.
- `updates`: the user's optimizer for one parameter, for some, or for all.
- `active`, `moves`: which units train in a run, and how far they move.
- `clipping`: clipping by the global norm, gradient by gradient.
- `masters`: an optimizer with float32 copies of low-precision weights.
- `random/`: random states, so that what runs again draws what it drew before.
- `shadow/`: the comparison with plain PyTorch.
- `observe/`: memory and time of an iteration.
- `files/`: tensors in files.
- `whitelist`: checks what generated code consists of before it runs.
- `dispatch`: how PyTorch dispatches calls while a step runs.
"""

from __future__ import annotations

from stowage.stages.runtime.executors.verbs import Iteration
from stowage.stages.runtime.program import Program
from stowage.stages.runtime.random.randomness import RandomStates
from stowage.stages.runtime.updates import PerParameterUpdates

__all__ = ["Iteration", "PerParameterUpdates", "Program", "RandomStates"]
