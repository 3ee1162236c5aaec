"""Lists the operators that are cheap enough to be computed again in backward, of a value that was packed."""

from __future__ import annotations

import json

from stowage.stages.ir.trace import Call

CHEAP = frozenset(
    f"aten.{name}"
    for name in (
        "abs.default",
        "add.Scalar",
        "add.Tensor",
        "clone.default",
        "div.Scalar",
        "div.Tensor",
        "exp.default",
        "gelu.default",
        "hardswish.default",
        "hardtanh.default",
        "leaky_relu.default",
        "mean.dim",
        "mul.Scalar",
        "mul.Tensor",
        "native_group_norm.default",
        "native_layer_norm.default",
        "neg.default",
        "pow.Tensor_Scalar",
        "relu.default",
        "rsqrt.default",
        "rsub.Scalar",
        "sigmoid.default",
        "silu.default",
        "sub.Tensor",
        "tanh.default",
        "_to_copy.default",
    )
)
"""Operators of one pass over their inputs, without random numbers."""

ATTENTION = (
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
)
"""Fused attention and its backward, whose first arguments are q, k and v.

Backward reads the log-sum-exp that forward saved: with other q, k and v its gradients would be wrong by more than they
are. So these may be packed only where attention is computed again of what is unpacked.
"""

_DROPOUT = {"aten._scaled_dot_product_flash_attention": 3}
"""Position of the probability of dropout among the arguments; it is 5 where it is not named here."""


def draws(attention: Call) -> bool:
    """Say whether a call of fused attention draws random numbers: the schema says of all that they may."""
    arguments = json.loads(attention.arguments)
    position = next((p for name, p in _DROPOUT.items() if attention.target.startswith(name)), 5)
    args = arguments["args"]
    given = args[position] if len(args) > position else arguments["kwargs"].get("dropout_p", 0.0)
    return bool(given != 0)
