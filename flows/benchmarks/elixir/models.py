"""Describes GPT-2 models as tables of groups, by formulas: activation checkpointing of every layer, FlashAttention.

The number of FLOPs is that of matrix products; element-wise work is counted by the bytes that it moves. TFLOPS are 8 M
D
per second, as in the paper: M parameters, D tokens, a forward counted twice as it is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.parallel import ParameterGroup

SEQUENCE = 1024
"""Tokens of every sequence."""

TRAFFIC = 80
"""Bytes that element-wise operations move for each token, layer and element of the hidden size, in one pass."""

LAYER_BYTES = 42
"""Most bytes of activations for each token and element of the hidden size, while a layer runs backward.

34 are kept by a layer of GPT-2 in half precision without its attention matrices, and gradients are beside them.
"""

LOGIT_BYTES = 9
"""Bytes for each token and word of the vocabulary at the loss: with it, the paper's 1.3 GB for GPT2-4b, batch 2."""


@dataclass(frozen=True)
class Gpt2:
    """A GPT-2 model (Table 6)."""

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int = 50257
    positions: int = SEQUENCE

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """Return the sizes of a layer's parameters, in the order of use: weights with their biases."""
        h = self.hidden
        return (2 * h, 3 * h * h, 3 * h, h * h, h, 2 * h, 4 * h * h, 4 * h, 4 * h * h, h)

    @property
    def layer_elements(self) -> int:
        """Return the parameters of a layer."""
        return sum(self.layer_parameters)

    @property
    def tied_elements(self) -> int:
        """Return the words' embedding, which is the head too."""
        return self.vocabulary * self.hidden

    @property
    def elements(self) -> int:
        """Return all parameters (M)."""
        return self.layers * self.layer_elements + self.tied_elements + (self.positions + 2) * self.hidden

    def flops(self, batch: int) -> float:
        """Return 8 M D of one GPU."""
        return 8.0 * self.elements * batch * SEQUENCE

    def saved_bytes(self, batch: int) -> int:
        """Return what a layer keeps from forward to backward: its input."""
        return 2 * batch * SEQUENCE * self.hidden

    def layer_bytes(self, batch: int) -> int:
        """Return most bytes of activations while a layer runs backward."""
        return LAYER_BYTES * batch * SEQUENCE * self.hidden

    def logit_bytes(self, batch: int) -> int:
        """Return most bytes of activations at the loss."""
        return LOGIT_BYTES * batch * SEQUENCE * self.vocabulary

    def activation_bytes(self, batch: int) -> int:
        """Return most bytes of activations at any moment."""
        return self.layers * self.saved_bytes(batch) + max(self.layer_bytes(batch), self.logit_bytes(batch))

    def layer_forward_s(self, batch: int, matmul_flops: float, memory_bytes_per_s: float) -> float:
        """Return the time of a layer's forward: products with weights, attention, and element-wise operations."""
        tokens = batch * SEQUENCE
        flops = 2.0 * self.layer_elements * tokens + 4.0 * tokens * SEQUENCE * self.hidden
        return flops / matmul_flops + TRAFFIC * tokens * self.hidden / memory_bytes_per_s

    def groups(self, batch: int, matmul_flops: float, memory_bytes_per_s: float) -> tuple[ParameterGroup, ...]:
        """Return the root and a group for each layer."""
        head_s = 2.0 * self.tied_elements * batch * SEQUENCE / matmul_flops
        layer_s = self.layer_forward_s(batch, matmul_flops, memory_bytes_per_s)
        rest = self.elements - self.layers * self.layer_elements
        root = _group(0, "", rest, head_s, 2 * head_s, 0, self.logit_bytes(batch), self.logit_bytes(batch), -1)
        layer_bytes = self.layer_bytes(batch)
        return (
            root,
            *(
                _group(
                    i + 1,
                    f"transformer.h.{i}",
                    self.layer_elements,
                    layer_s,
                    3 * layer_s,
                    self.saved_bytes(batch),
                    layer_bytes,
                    layer_bytes,
                    i,
                )
                for i in range(self.layers)
            ),
        )


def _group(
    number: int,
    module: str,
    elements: int,
    forward_s: float,
    backward_s: float,
    saved: int,
    forward_peak: int,
    backward_peak: int,
    segment: int,
) -> ParameterGroup:
    return ParameterGroup(
        group=number,
        modules=(module,),
        parameters=(),
        elements=elements,
        trainable=elements,
        stored_bytes=4,
        compute_bytes=2,
        state_bytes=8,
        forward_s=forward_s,
        backward_s=backward_s,
        saved_bytes=saved,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        segment=segment,
    )


MODELS = {
    m.name: m
    for m in (
        Gpt2("GPT2-4b", 3072, 32, 24),
        Gpt2("GPT2-10b", 4096, 48, 32),
        Gpt2("GPT2-15b", 8192, 18, 64),
        Gpt2("GPT2-20b", 8192, 24, 64),
    )
}
"""Table 6."""

OPT_175B = Gpt2("OPT-175B", 12288, 96, 96, vocabulary=50272, positions=2048)
"""OPT-175B, whose layers have the shape of GPT-2's."""
