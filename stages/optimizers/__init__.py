"""What an optimizer does, learnt on copies of the user's own object that step made-up tensors: whether it updates each
tensor by itself, which states it keeps, and what an update costs. The object itself is never stepped, nor is its class
made anew."""

from stowage.stages.optimizers.bench import Bench
from stowage.stages.optimizers.content import tensors_in
from stowage.stages.optimizers.known import KnownOptimizer
from stowage.stages.optimizers.signature import OptimizerSignature, signature_of
from stowage.stages.optimizers.single import bare_step, step_alone, step_some
from stowage.stages.optimizers.states import Form, KeptStates, StateTensor, kept_states
from stowage.stages.optimizers.trial import Habits, habits_of
from stowage.stages.optimizers.twin import twin_of

__all__ = [
    "Bench",
    "Form",
    "Habits",
    "KeptStates",
    "KnownOptimizer",
    "OptimizerSignature",
    "StateTensor",
    "bare_step",
    "habits_of",
    "kept_states",
    "signature_of",
    "step_alone",
    "step_some",
    "tensors_in",
    "twin_of",
]
