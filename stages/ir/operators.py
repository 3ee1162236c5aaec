"""Facts about operators that several stages need; names as in `Call.target`."""

from __future__ import annotations

OPAQUE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Operators with an output (a workspace) whose size and contents only the real kernel knows. The kernel makes it only
while gradients are enabled, and its backward crashes on any other contents."""

METHODS = {
    "aten.abs.default": "abs",
    "aten.add.Tensor": "add",
    "aten.add_.Tensor": "add_",
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
"""Operators that a step calls as methods of their first argument: `x.view([4, 8])`. The same call is dispatched (only
those for which that is tested are here: `x.mul(2.0)` is not `aten.mul.Scalar`), PyTorch's own bindings get there about
1 us sooner than `torch.ops`, and it reads better."""
