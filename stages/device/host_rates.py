"""Rates of the host memory behind a GPU: copies to and from pinned memory, and updates by the CPU beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

BYTES = 1 << 28
"""Of one copy."""

TRAFFIC = 7
"""Numbers of the parameter's type that an AdamW update reads and writes: gradient, weight and two states, the last
three twice."""


@dataclass(frozen=True)
class HostRates:
    """Bytes per second.

    Attributes:
        offload, reload: one direction alone.
        duplex: both at once, summed.
        update: read and written by AdamW's update on the CPU, beside copies in both directions.
    """

    offload: float
    reload: float
    duplex: float
    update: float


def give_back_pinned() -> None:
    """Give freed pinned memory back to the system: PyTorch keeps it for the next who asks."""
    empty: Any = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def measure_host_rates(
    device: torch.device,
    make_optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
) -> HostRates:
    """Medians of five.

    Args:
        device: the GPU.
        make_optimizer, dtype: whose updates are measured; its traffic is counted as AdamW's.
    """
    stream: Any = torch.cuda.Stream
    down_stream, up_stream = stream(device), stream(device)
    one, two = (torch.ones(BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    lower_one, lower_two = (torch.empty(BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2))

    def down() -> None:
        with torch.cuda.stream(down_stream):
            lower_one.copy_(one, non_blocking=True)

    def up() -> None:
        with torch.cuda.stream(up_stream):
            two.copy_(lower_two, non_blocking=True)

    def seconds(*copies: Callable[[], None]) -> float:
        def once() -> float:
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for copy in copies:
                copy()
            torch.cuda.synchronize(device)
            return time.perf_counter() - start

        once()
        return sorted(once() for _ in range(5))[2]

    parameter = torch.nn.Parameter(torch.randn(1 << 25, device="cpu").to(dtype))
    parameter.grad = torch.randn(1 << 25, device="cpu").to(dtype)
    optimizer = make_optimizer([parameter])

    def update() -> float:
        torch.cuda.synchronize(device)
        for _ in range(8):
            down()
            up()
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    update()
    updated = sorted(update() for _ in range(5))[2]
    torch.cuda.synchronize(device)
    return HostRates(
        offload=BYTES / seconds(down),
        reload=BYTES / seconds(up),
        duplex=2 * BYTES / seconds(down, up),
        update=TRAFFIC * parameter.numel() * parameter.element_size() / updated,
    )
