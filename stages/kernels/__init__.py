"""What real kernels do, learned by running them on made-up arguments: fake ones do not always tell.

forms.py      type, shape, strides and storage of a tensor
made_up.py    tensors of a form, with several kinds of contents: not every operator takes every number
known.py      what was learned of calls so far in this process
store.py      and in earlier ones
substitutes.py  fake kernels of our own
encoder.py    an operator for layers of `nn.TransformerEncoder` on padded sequences
"""

from __future__ import annotations

from stowage.stages.kernels.forms import Form, Output, output_at, outputs_of, parse_all, texts
from stowage.stages.kernels.known import FakeKernelError, KnownOutputs, Outputs, known_outputs
from stowage.stages.kernels.made_up import USUAL, Around, Kind, kinds_of, made_up
from stowage.stages.kernels.store import ReturnedStore
from stowage.stages.kernels.substitutes import SUBSTITUTES

__all__ = [
    "SUBSTITUTES",
    "USUAL",
    "Around",
    "FakeKernelError",
    "Form",
    "Kind",
    "KnownOutputs",
    "Output",
    "Outputs",
    "ReturnedStore",
    "kinds_of",
    "known_outputs",
    "made_up",
    "output_at",
    "outputs_of",
    "parse_all",
    "texts",
]
