"""Operators that take indices: on a GPU, one outside of a dimension ends the process."""

from __future__ import annotations

from typing import Any

import torch

from stowage.stages.kernels import Around, Form
from stowage.stages.profile.arguments import tensors_in

INDEXING = frozenset(
    f"aten.{name}"
    for name in (
        "embedding.default",
        "embedding_dense_backward.default",
        "_embedding_bag.default",
        "gather.default",
        "gather_backward.default",
        "index.Tensor",
        "index_add.default",
        "index_add_.default",
        "index_copy.default",
        "index_copy_.default",
        "index_put.default",
        "index_put_.default",
        "_unsafe_index.Tensor",
        "_unsafe_index_put.default",
        "index_select.default",
        "index_select_backward.default",
        "nll_loss_forward.default",
        "nll_loss_backward.default",
        "nll_loss2d_forward.default",
        "nll_loss2d_backward.default",
        "scatter.src",
        "scatter.value",
        "scatter_.src",
        "scatter_.value",
        "scatter_add.default",
        "scatter_add_.default",
        "scatter_reduce.two",
        "take.default",
        "put.default",
    )
)


def moved_inside(args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Keep integers below every dimension of the tensors beside them, wherever they point; whether any was not."""
    tensors = tensors_in(args, kwargs)
    indices = [t for t in tensors if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)]
    around = Around.of(Form.of(t) for t in tensors if all(t is not i for i in indices))
    if len(indices) == len(tensors):  # of integers: what is looked up comes first
        around, indices = Around.of([Form.of(tensors[0])]), indices[1:]
    outside = [t for t in indices if t.numel() and not (int(t.min()) >= 0 and int(t.max()) < around.index)]
    for tensor in outside:
        tensor.clamp_(0, around.index - 1)
    return bool(outside)
