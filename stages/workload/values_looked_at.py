"""Properties of a batch's values that libraries look at to choose what they run: no padding, one sequence a row.

In plain PyTorch attention of `transformers` is called without a mask where a mask masks nothing, and where positions
count up. So that a step is traced and run in the same way, the answers belong to the batch's signature.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

NO_PADDING, PADDING = "masks nothing", "masks something"
ONE_SEQUENCE, SEVERAL = "one sequence a row", "several sequences a row"
_WHOLE = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def looked_at(path: str, tensor: torch.Tensor) -> str:
    """The property of a tensor at `path` in a batch; nothing where it is no mask and no positions.

    A few reductions over whole numbers of at most two dimensions; a library that looks does the same.
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
