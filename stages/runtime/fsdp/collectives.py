"""The collectives of FSDP2, with names: where a rank is lost or hangs, the others say what they were waiting for.

They do what FSDP2's own do, and are handed to it by `set_custom_all_gather` and `set_custom_reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stowage.stages.runtime.sharding.failures import Failures


class _Named:
    """Something that is exchanged again and again.

    Attributes:
        failures: what has been heard of ranks that are lost.
        what: its name in errors.
    """

    def __init__(self, failures: Failures, what: str) -> None:
        self.failures = failures
        self.what = what

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return new memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def started(self, work: Any, device: torch.device) -> Any:
        """Return what FSDP2 waits for; None where nothing is left to be waited for by the process."""
        if work is not None:
            return _NamedWork(work, self.failures, self.what, device)
        _watch(self.failures, self.what, device)
        return None


class AllGather(_Named):
    """Gathers shards; see FSDP2's `AllGather`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Fill `output_tensor` with the shards of all ranks.

        Raises:
            RankError: another rank has ended, hangs, or has failed.
        """
        with self.failures.named(self.what):
            work = self.gather(output_tensor, input_tensor, group, async_op)
        return self.started(work, output_tensor.device)

    def gather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        """Start filling `output_tensor`, and wait for it unless `async_op`."""
        start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return start(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(_Named):
    """Adds up gradients; see FSDP2's `ReduceScatter`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Fill `output_tensor` with this rank's part of the sum of all ranks.

        Raises:
            RankError: another rank has ended, hangs, or has failed.
        """
        with self.failures.named(self.what):
            work = self.reduce(output_tensor, input_tensor, group, op, async_op)
        return self.started(work, output_tensor.device)

    def reduce(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool
    ) -> Any:
        """Start filling `output_tensor`, and wait for it unless `async_op`."""
        start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return start(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class _NamedWork(dist.Work):
    """An exchange under way; it is one of PyTorch's kind, since FSDP2 waits for no other."""

    def __init__(self, work: Any, failures: Failures, what: str, device: torch.device) -> None:
        super().__init__()
        self._work, self._failures, self._what, self._device = work, failures, what, device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is over: on a GPU, what is queued from now on waits."""
        with self._failures.named(self._what):
            done = bool(self._work.wait(timeout) if timeout else self._work.wait())
        _watch(self._failures, self._what, self._device)
        return done

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return bool(self._work.is_completed())


def _watch(failures: Failures, what: str, device: torch.device) -> None:
    """Let an exchange that the GPU waits for be named where it takes long."""
    if device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        failures.watch.until(event, what)
