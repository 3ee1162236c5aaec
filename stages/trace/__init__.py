"""Records the training step as tables of ATen calls.

- `step.py`: the whole training step: forward, loss, backward and updates.
- `forward.py`: a forward alone, as evaluation runs it.
- `updates.py`: what happens to gradients: accumulation, clipping and the optimizer's updates.
- `rounds.py`: tracing a step several times, to see what it does whatever its numbers are.
- `capture.py`: one trace of forward, loss and backward as an `fx.Graph`.
- `lower.py`: from that graph to tables.
- `compact.py`: drops from them what nothing needs.
- `compared.py`: what was recorded as text, for ranks to compare.
- `checks.py`: models and steps that cannot be traced.
- `explain.py`: errors of a trace in one sentence.
- `lines.py`: the source line of a module.
- `requires_grad.py`: where plain PyTorch computes with other kernels because parameters are frozen.
- `layouts_by_training.py`: where results must lie as plain PyTorch lays them out while parameters are frozen.
- `calls`: facts about calls and their arguments.
- `recording`: recording a program on tensors without memory.
- `objects`: the user's objects, restored and read while a step is traced.
- `__main__.py`: the stage's command.
"""

from stowage.stages.trace.compared import recorded_text
from stowage.stages.trace.forward import RecordedForward, forward_tables, record_forward
from stowage.stages.trace.objects.effects import Left
from stowage.stages.trace.objects.outside import Outside
from stowage.stages.trace.step import Recorded, parameters_of, record_step, trace_step, with_outside, with_updates
from stowage.stages.trace.updates import MicroBatch

__all__ = [
    "Left",
    "MicroBatch",
    "Outside",
    "Recorded",
    "RecordedForward",
    "forward_tables",
    "parameters_of",
    "record_forward",
    "record_step",
    "recorded_text",
    "trace_step",
    "with_outside",
    "with_updates",
]
