"""Record the training step as tables of ATen calls."""

from stowage.stages.trace.forward import RecordedForward, forward_tables, record_forward
from stowage.stages.trace.objects.left import Left
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
    "trace_step",
    "with_outside",
    "with_updates",
]
