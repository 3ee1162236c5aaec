"""Measures the host memory behind a GPU: copies to and from pinned memory, and updates by the CPU beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from stowage.stages.device.rates.at_once import ALONE, Stopwatch, Work, nothing

BYTES = 1 << 28
"""Bytes of one copy."""

ELEMENTS = 1 << 25
"""Elements of the parameter that is updated."""

BYTES_ON_CPU, ELEMENTS_ON_CPU = 1 << 26, 1 << 22
"""The same where the CPU is the device, as its description is measured."""

COPIES_BESIDE = 8
"""Copies in each direction beside an update, or beside a collective: they take longer than it does."""

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


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


class HostCopies:
    """Copies between a GPU and pinned memory, each direction on a stream of its own; on a CPU, within its memory.

    Attributes:
        nbytes: bytes of one copy.
    """

    def __init__(self, device: torch.device) -> None:
        """Take memory for them."""
        on_card = device.type == "cuda"
        self.nbytes = BYTES if on_card else BYTES_ON_CPU
        self._device = device
        stream: Any = torch.cuda.Stream
        self._down: Any = stream(device) if on_card else None
        self._up: Any = stream(device) if on_card else None
        self._one, self._two = (torch.ones(self.nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        self._lower_one, self._lower_two = (
            torch.ones(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=on_card) for _ in range(2)
        )

    def down(self) -> None:
        """Start a copy to the host."""
        with torch.cuda.stream(self._down):
            self._lower_one.copy_(self._one, non_blocking=True)

    def up(self) -> None:
        """Start a copy from the host."""
        with torch.cuda.stream(self._up):
            self._two.copy_(self._lower_two, non_blocking=True)

    def wait(self) -> None:
        """Wait for all of them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def beside(self) -> None:
        """Start many in both directions, which run beside what follows; on a CPU none, as they would come before it."""
        self.wait()
        for _ in range(COPIES_BESIDE if self._device.type == "cuda" else 0):
            self.down()
            self.up()

    def seconds(self, stopwatch: Stopwatch, *copies: Work) -> float:
        """Return the median of the times that copies take, all of them started at once."""

        def work() -> None:
            for copy in copies:
                copy()
            self.wait()

        stopwatch.seconds(work, self.wait)
        return sorted(stopwatch.seconds(work, self.wait) for _ in range(5))[2]


def measure_host_rates(
    device: torch.device,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
) -> HostRates:
    """Return medians of five measurements.

    Args:
        device: the GPU.
        make_optimizer: makes an optimizer of a list of one parameter.
        dtype: the parameter's dtype.
    """
    return measure_copies(HostCopies(device), make_optimizer, dtype)


def measure_copies(
    copies: HostCopies, make_optimizer: MakeOptimizer, dtype: torch.dtype, stopwatch: Stopwatch = ALONE
) -> HostRates:
    """Return the rates of copies, and of updates beside them: of this process, or of each rank while all do the same.

    Args:
        copies: the copies.
        make_optimizer: see `measure_host_rates`.
        dtype: see `measure_host_rates`.
        stopwatch: times them.
    """
    elements = ELEMENTS if copies.nbytes == BYTES else ELEMENTS_ON_CPU
    update = measure_update_rate(make_optimizer, dtype, copies.beside, elements, stopwatch)
    copies.wait()
    return HostRates(
        offload=copies.nbytes / copies.seconds(stopwatch, copies.down),
        reload=copies.nbytes / copies.seconds(stopwatch, copies.up),
        duplex=2 * copies.nbytes / copies.seconds(stopwatch, copies.down, copies.up),
        update=update,
    )


def measure_update_rate(
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype,
    beside: Work = nothing,
    elements: int = ELEMENTS,
    stopwatch: Stopwatch = ALONE,
) -> float:
    """Return the bytes per second that the optimizer's update of one parameter on the CPU reads and writes.

    It reads the gradient once, and reads and writes weight and states. The rate is the median of five.

    Args:
        make_optimizer: makes an optimizer of a list of one parameter.
        dtype: the parameter's dtype.
        beside: starts what runs beside each update.
        elements: the parameter's elements.
        stopwatch: times the updates.
    """
    parameter = torch.nn.Parameter(torch.randn(elements, device="cpu").to(dtype))
    parameter.grad = torch.randn(elements, device="cpu").to(dtype)
    optimizer = make_optimizer([parameter])

    stopwatch.seconds(optimizer.step, beside)
    states = [t for t in optimizer.state.get(parameter, {}).values() if torch.is_tensor(t)]
    traffic = 3 * parameter.nbytes + 2 * sum(t.nbytes for t in states)
    return traffic / sorted(stopwatch.seconds(optimizer.step, beside) for _ in range(5))[2]
