"""Measures the host memory behind a GPU: copies to and from pinned memory, and updates by the CPU beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

BYTES = 1 << 28
"""Bytes of one copy."""

ELEMENTS = 1 << 25
"""Elements of the parameter that is updated."""


@dataclass(frozen=True)
class HostRates:
    """Rates of the host memory, in bytes per second.

    Attributes:
        offload, reload: one direction alone.
        duplex: both at once, summed.
        update: read and written by an update on the CPU, beside copies in both directions.
    """

    offload: float
    reload: float
    duplex: float
    update: float


def give_back_pinned() -> None:
    """Give freed pinned memory back to the system: PyTorch keeps it for later requests."""
    empty: Any = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def measure_host_rates(
    device: torch.device,
    make_optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
) -> HostRates:
    """Return medians of five measurements.

    Args:
        device: the GPU.
        make_optimizer: makes an optimizer of a list of one parameter.
        dtype: the parameter's dtype.
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

    def beside() -> None:
        torch.cuda.synchronize(device)
        for _ in range(8):
            down()
            up()

    update = measure_update_rate(make_optimizer, dtype, beside)
    torch.cuda.synchronize(device)
    return HostRates(
        offload=BYTES / seconds(down),
        reload=BYTES / seconds(up),
        duplex=2 * BYTES / seconds(down, up),
        update=update,
    )


def measure_update_rate(
    make_optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
    dtype: torch.dtype,
    beside: Callable[[], None] = lambda: None,
    elements: int = ELEMENTS,
) -> float:
    """Return the bytes per second that the optimizer's update of one parameter on the CPU reads and writes.

    It reads the gradient once, and reads and writes weight and states. The rate is the median of five.

    Args:
        make_optimizer: makes an optimizer of a list of one parameter.
        dtype: the parameter's dtype.
        beside: starts what runs beside each update.
        elements: the parameter's elements.
    """
    parameter = torch.nn.Parameter(torch.randn(elements, device="cpu").to(dtype))
    parameter.grad = torch.randn(elements, device="cpu").to(dtype)
    optimizer = make_optimizer([parameter])

    def update_s() -> float:
        beside()
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    update_s()
    states = [t for t in optimizer.state.get(parameter, {}).values() if torch.is_tensor(t)]
    traffic = 3 * parameter.nbytes + 2 * sum(t.nbytes for t in states)
    return traffic / sorted(update_s() for _ in range(5))[2]
