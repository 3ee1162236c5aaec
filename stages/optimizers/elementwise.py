"""Tries on copies whether an optimizer updates each element by itself, so that a shard may stand for its part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from stowage.stages.ir.errors import TraceError
from stowage.stages.optimizers.quiet import SEED, quiet
from stowage.stages.optimizers.single import bare_step
from stowage.stages.optimizers.trial import SCALES
from stowage.stages.optimizers.twin import twin_of

ROWS, WIDTH = 32, 16
"""Sides of stand-ins; half of the rows is a multiple of what a processor computes at once."""

ROUNDING = 1e-5
"""Relative difference below which results differ by rounding alone."""


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str:
    """Return why the update of a part is not the part of the update; "" for optimizers that go element by element.

    Copies of the optimizer step one stand-in of each group and number of dimensions, whole and cut in two. SGD, Adam,
    AdamW and Lion go element by element; Adafactor, LAMB and Muon look at whole tensors.

    Raises:
        TraceError: the optimizer cannot be copied.
    """
    originals = one_of_each_kind(optimizer)
    with quiet():
        try:
            whole = _stepped(optimizer, originals, slice(None))
            halves = [_stepped(optimizer, originals, part) for part in (slice(0, ROWS // 2), slice(ROWS // 2, None))]
        except TraceError:
            raise
        except Exception as error:
            return f"it cannot step stand-ins ({type(error).__name__}: {error})"
    for i, expected in enumerate(whole):
        found = torch.cat([half[i] for half in halves])
        if not torch.allclose(found, expected, rtol=ROUNDING, atol=0.0):
            return f"an update of a tensor with {expected.ndim} dimensions depends on all of the tensor"
    return ""


def one_of_each_kind(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return a parameter of each group and number of dimensions."""
    found: dict[tuple[int, int], nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.ndim:
                found.setdefault((index, parameter.ndim), parameter)
    return list(found.values())


def _stepped(optimizer: torch.optim.Optimizer, originals: Sequence[nn.Parameter], part: slice) -> list[torch.Tensor]:
    """Return stand-ins after some steps on a part of the same gradients."""
    generator = torch.Generator().manual_seed(SEED)

    def drawn(like: nn.Parameter) -> torch.Tensor:
        shape = (ROWS, *(min(n, WIDTH) for n in like.shape[1:]))
        return torch.randn(shape, generator=generator, dtype=torch.float32)[part].clone()

    stand_ins = [nn.Parameter(drawn(p)) for p in originals]
    twin = twin_of(optimizer, {id(p): s for p, s in zip(originals, stand_ins, strict=True)})
    for scale in SCALES:
        for original, stand_in in zip(originals, stand_ins, strict=True):
            stand_in.grad = drawn(original) * scale
        bare_step(twin)
    return [s.detach() for s in stand_ins]
