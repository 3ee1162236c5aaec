"""Measures how much gradients change when values that forward saves for backward are kept in fewer bits.

- `interpreter`: runs the forward and backward of a trace, call by call, on a model's own tensors.
- `measure`: compares gradients with and without a rewrite, for each class of values and each kind of codes.
- `moved`: moves weights a little, where one batch is all there is to measure on.
- `spread`: tells how much a gradient varies from batch to batch.
- `store`: keeps what was measured.
"""

from stowage.stages.sensitivity.interpreter import StepTensors, run_trace
from stowage.stages.sensitivity.measure import gradient_error, gradient_errors
from stowage.stages.sensitivity.store import ErrorStore

__all__ = ["ErrorStore", "StepTensors", "gradient_error", "gradient_errors", "run_trace"]
