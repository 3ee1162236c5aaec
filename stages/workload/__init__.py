"""Defines what is trained (model, batches, optimizer, schedule) and what a traced step is valid for.

- `models.py`: a model with a loss, from an architecture, a local directory or the user's function.
- `samples.py`: a synthetic batch with the arguments that a model takes.
- `data.py`: real tokens: a stream on disk, and batches that are a pure function of seed and iteration.
- `user_batches.py`: batches that the user's function makes.
- `called.py`: which modules are called, and what needs a gradient there.
- `repeated.py`: blocks that are built alike, and a model with fewer of them.
- `resize.py`: a batch with another number of samples.
- `optimizers.py`: optimizers and learning-rate schedules by name.
- `configured.py`: model, batch and optimizer as params.yaml says; not imported here, since it needs more than torch
  does.
- `calls.py`: calling a model on a batch and finding its loss.
- `outputs.py`: a model's outputs, taken apart into tensors and the rest, and put together again.
- `signature.py`: properties of batch and model that must not change between tracing and training.
- `model_watch.py`: a model's signature, taken anew only when something changed.
- `values_looked_at.py`: properties of masks and positions that choose kernels, as part of the batch's signature.
- `executed.py`: which Python code ran.
- `reach.py`: what that code can have read outside of the batch.
- `standard.py`: what Python's own objects hold.
- `ways.py`: how a part of an object is reached and read again.
- `surroundings.py`: where such values are, and reading them again.
- `autocast.py`: switching autocast off.
- `guard.py`: errors of the user's code in one sentence.
- `randomness.py`: draws that leave the global generators alone.
"""

from stowage.stages.workload.data import batches, token_stream
from stowage.stages.workload.models import Workload, build_model, build_workload
from stowage.stages.workload.optimizers import optimizer_factory, scheduler_factory
from stowage.stages.workload.samples import sample_batch
from stowage.stages.workload.signature import BatchSignature, ModelSignature, batch_signature, model_signature

__all__ = [
    "BatchSignature",
    "ModelSignature",
    "Workload",
    "batch_signature",
    "batches",
    "build_model",
    "build_workload",
    "model_signature",
    "optimizer_factory",
    "sample_batch",
    "scheduler_factory",
    "token_stream",
]
