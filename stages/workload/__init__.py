"""What is trained: the model, its batches, its optimizer and schedule, and what a traced step is valid for.

models.py      a model with a loss, from an architecture, a local directory or the user's function
samples.py     a synthetic batch with the arguments that a model takes
data.py        real tokens: a stream on disk, and batches that are a pure function of seed and iteration
optimizers.py  optimizers and learning-rate schedules by name
signature.py   what must not change between tracing and training
outputs.py     what a model returns, taken apart and put together
configured.py  model, batch and optimizer as params.yaml says; not imported here, since it needs more than torch does
randomness.py  draws that leave the global generators alone
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
