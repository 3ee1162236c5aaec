"""Learns what real kernels return by running them on made-up arguments, because fake kernels are not always right.

- `forms.py`: dtype, shape, strides and storage of a tensor.
- `made_up.py`: tensors of a form with several kinds of contents, since not every operator accepts every number.
- `known.py`: what this process has learned about calls so far.
- `store.py`: what earlier processes learned, on disk.
- `substitutes.py`: fake kernels of our own.
- `encoder.py`: an operator for layers of `nn.TransformerEncoder` on padded sequences.
- `attention.py`: operators for attention whose kernels PyTorch chooses by what trains.
- `products.py`: operators for products whose kernels PyTorch chooses by what trains.
- `by_content.py`: operators whose kernels PyTorch chooses by what tensors contain.
- `failed.py`: recognizes a GPU that has failed.
"""

from __future__ import annotations

from stowage.stages.kernels.attention import attention, attention_gradients
from stowage.stages.kernels.by_content import prod_gradient, weight_of_targets
from stowage.stages.kernels.encoder import encoder_layer
from stowage.stages.kernels.forms import Form, Output, output_at, outputs_of, parse_all, texts
from stowage.stages.kernels.known import FakeKernelError, KnownOutputs, Outputs, known_outputs
from stowage.stages.kernels.made_up import USUAL, Around, ContentKind, kinds_of, made_up
from stowage.stages.kernels.products import matmul, matmul_input_gradient
from stowage.stages.kernels.store import ReturnedStore
from stowage.stages.kernels.substitutes import SUBSTITUTES

__all__ = [
    "SUBSTITUTES",
    "USUAL",
    "Around",
    "ContentKind",
    "FakeKernelError",
    "Form",
    "KnownOutputs",
    "Output",
    "Outputs",
    "ReturnedStore",
    "attention",
    "attention_gradients",
    "encoder_layer",
    "kinds_of",
    "known_outputs",
    "made_up",
    "matmul",
    "matmul_input_gradient",
    "output_at",
    "outputs_of",
    "parse_all",
    "prod_gradient",
    "texts",
    "weight_of_targets",
]
