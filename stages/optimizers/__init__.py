"""Learns what an optimizer does from copies of the user's own object that step made-up tensors.

It learns whether each tensor is updated by itself, which states are kept, and what an update costs. The object itself
is never stepped, and its class is never called.

- `twin.py`: a copy of an optimizer with stand-ins in place of the parameters.
- `quiet.py`: a block in which copies step without side effects.
- `content.py`: every tensor and plain value that an object holds.
- `single.py`: one step for one or some of the parameters.
- `trial.py`: whether each tensor can be updated by itself.
- `elementwise.py`: whether each element can be updated by itself.
- `states.py`: the states that an optimizer keeps for each parameter.
- `signature.py`: the properties of an optimizer that a plan depends on.
- `known.py`: what was learnt about one optimizer, until its groups change.
- `described.py`: class, settings and parameters as text, to compare between processes.
- `shards.py`: whether the update of a shard is that part of the update of the whole.
- `bench.py`: an update that can be timed and measured.
"""

from stowage.stages.optimizers.bench import Bench
from stowage.stages.optimizers.content import tensors_in
from stowage.stages.optimizers.described import optimizer_text
from stowage.stages.optimizers.elementwise import one_of_each_kind, why_not_elementwise
from stowage.stages.optimizers.known import KnownOptimizer
from stowage.stages.optimizers.shards import OnShards, on_shards
from stowage.stages.optimizers.signature import OptimizerSignature, signature_of
from stowage.stages.optimizers.single import bare_step, step_alone, step_some
from stowage.stages.optimizers.states import KeptStates, StateForm, StateTensor, kept_states
from stowage.stages.optimizers.trial import Habits, habits_of
from stowage.stages.optimizers.twin import twin_of

__all__ = [
    "Bench",
    "Habits",
    "KeptStates",
    "KnownOptimizer",
    "OnShards",
    "OptimizerSignature",
    "StateForm",
    "StateTensor",
    "bare_step",
    "habits_of",
    "kept_states",
    "on_shards",
    "one_of_each_kind",
    "optimizer_text",
    "signature_of",
    "step_alone",
    "step_some",
    "tensors_in",
    "twin_of",
    "why_not_elementwise",
]
