"""Facts about operators that several stages need; names as in `Call.target`."""

from __future__ import annotations

OPAQUE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Operators with an output (a workspace) whose size and contents only the real kernel knows.

The kernel makes it only while gradients are enabled, and its backward crashes on any other contents.
"""

SEALS = {
    "aten._cudnn_attention_forward": "aten._cudnn_attention_backward",
    "aten._cudnn_rnn": "aten._cudnn_rnn_backward",
    "aten._efficient_attention_forward": "aten._efficient_attention_backward",
    "aten._flash_attention_forward": "aten._flash_attention_backward",
    "aten._scaled_dot_product_cudnn_attention": "aten._scaled_dot_product_cudnn_attention_backward",
    "aten._scaled_dot_product_efficient_attention": "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_flash_attention": "aten._scaled_dot_product_flash_attention_backward",
    "aten.cudnn_batch_norm": "aten.cudnn_batch_norm_backward",
    "aten.mkldnn_rnn_layer": "aten.mkldnn_rnn_layer_backward",
}
"""Operators with outputs that are for their own backward alone, and the backward that reads them.

Such outputs are seeds of random numbers, which a kernel may want in host memory whatever fake tensors say, and reserves
whose size and contents only the kernel knows. Made-up ones crash the process: profiling such a backward runs its
forward first.
"""


SPENDS = frozenset({"aten._cudnn_rnn_backward.default"})
"""Operators that overwrite what their forward saved for them, though no schema says so: they run once."""


def without_overload(target: str) -> str:
    """Return the name without its overload: `aten.addmm` for `aten.addmm.default`."""
    return target.rpartition(".")[0]


METHODS = {
    "aten.abs.default": "abs",
    "aten.add.Tensor": "add",
    "aten.add_.Tensor": "add_",
    "aten.bernoulli_.float": "bernoulli_",
    "aten.bmm.default": "bmm",
    "aten.clone.default": "clone",
    "aten.cos.default": "cos",
    "aten.div.Tensor": "div",
    "aten.exp.default": "exp",
    "aten.expand.default": "expand",
    "aten.mean.dim": "mean",
    "aten.mm.default": "mm",
    "aten.mul.Tensor": "mul",
    "aten.mul_.Tensor": "mul_",
    "aten.neg.default": "neg",
    "aten.permute.default": "permute",
    "aten.pow.Tensor_Scalar": "pow",
    "aten.relu.default": "relu",
    "aten.relu_.default": "relu_",
    "aten.rsqrt.default": "rsqrt",
    "aten.select.int": "select",
    "aten.sigmoid.default": "sigmoid",
    "aten.sin.default": "sin",
    "aten.split.Tensor": "split",
    "aten.split_with_sizes.default": "split_with_sizes",
    "aten.squeeze.dim": "squeeze",
    "aten.sub.Tensor": "sub",
    "aten.sum.dim_IntList": "sum",
    "aten.t.default": "t",
    "aten.tanh.default": "tanh",
    "aten.transpose.int": "transpose",
    "aten.unbind.int": "unbind",
    "aten.unsqueeze.default": "unsqueeze",
    "aten.view.default": "view",
}
"""Operators that a step calls as methods of their first argument: `x.view(4, 8)`.

The same call is dispatched (only operators for which that is tested are here), PyTorch's own bindings take 1 to 2 us
less than `torch.ops`, and it reads better.
"""

SPREAD = frozenset({"aten.expand.default", "aten.permute.default", "aten.view.default", "aten._unsafe_view.default"})
"""Operators whose sizes are given as separate arguments, because PyTorch's parser is slow with lists."""

ALIKE = {
    "aten._unsafe_view.default": "view",
    "aten.div.Scalar": "div",
    "aten.div_.Scalar": "div_",
    "aten.mul.Scalar": "mul",
}
"""Operators in the place of which a step calls a method that gives the same bits in the same memory.

The method needs one dispatch instead of two: `aten.mul.Scalar` makes a tensor of its number and calls
`aten.mul.Tensor`, as `x.mul(2.0)` does. (`aten.mul_.Scalar` multiplies the other way round, and rounds differently in
bfloat16.)
"""

FUNCTIONS = {
    "aten._log_softmax.default": "_log_softmax",
    "aten._log_softmax_backward_data.default": "_log_softmax_backward_data",
    "aten._safe_softmax.default": "_safe_softmax",
    "aten._softmax.default": "_softmax",
    "aten._softmax_backward_data.default": "_softmax_backward_data",
    "aten.addmm.default": "addmm",
    "aten.arange.default": "arange",
    "aten.baddbmm.default": "baddbmm",
    "aten.cat.default": "cat",
    "aten.convolution.default": "convolution",
    "aten.embedding.default": "embedding",
    "aten.empty_strided.default": "empty_strided",
    "aten.full.default": "full",
    "aten.full_like.default": "full_like",
    "aten.native_batch_norm.default": "native_batch_norm",
    "aten.native_layer_norm.default": "native_layer_norm",
    "aten.ones.default": "ones",
    "aten.scalar_tensor.default": "scalar_tensor",
    "aten.where.self": "where",
    "aten.zeros.default": "zeros",
}
"""Operators that a step calls as functions of `torch`, which dispatch the same call: `torch.addmm(…)`."""
