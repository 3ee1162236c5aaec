"""Finds properties of a batch's values by which libraries choose kernels: no padding, one sequence a row.

In plain PyTorch `transformers` calls attention without a mask if the mask masks nothing and positions count up. The
batch's signature contains these properties, so that a step runs the same kernels as were traced.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

NO_PADDING, PADDING = "masks nothing", "masks something"
ONE_SEQUENCE, SEVERAL = "one sequence a row", "several sequences a row"
_WHOLE = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def looked_at(path: str, tensor: torch.Tensor) -> str:
    """Return the property of a tensor at `path` in a batch; "" if it is neither a mask nor positions.

    It takes a few reductions over integer tensors of two dimensions, as the libraries themselves do.
    """
    if tensor.dtype not in _WHOLE or tensor.dim() != 2 or not tensor.numel():
        return ""
    if tensor.layout is not torch.strided or isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return ""
    with torch.no_grad():
        key = path.rpartition("[")[2].rpartition(".")[2].strip("]'\"")
        if "position_ids" in key:
            return ONE_SEQUENCE if bool((tensor.diff(dim=-1) == 1).all()) else SEVERAL
        if "mask" not in key and not key.isdecimal():
            return ""
        if tensor.dtype is not torch.bool:
            least, most = (int(value) for value in tensor.aminmax())
            if least < 0 or most > 1:
                return ""
            return NO_PADDING if least else PADDING
        return NO_PADDING if bool(tensor.all()) else PADDING
