"""No step makes the host wait for the device, which PyTorch tells of; with copies on streams of their own, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.gpu.cases import Case, adamw, fused
from tests.gpu.side_by_side import Planned, a_tier


@contextmanager
def never_waiting(device: str) -> Iterator[None]:
    """Calls that wait raise, on a GPU."""
    if device == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("how", [adamw, fused], ids=["default", "fused"])
@pytest.mark.parametrize("way", ["keep", "stream", "clip"])
def test_a_step_does_not_wait(way: str, how: object, device: str) -> None:
    case = Case("gpt2", device, optimizer=how, max_grad_norm=1.0 if way == "clip" else None)  # type: ignore[arg-type]
    streams = way == "stream"
    training = Planned(
        case,
        lambda one: one.together(one.stream_all() if streams else one.keep_all()),
        a_tier(device) if streams else None,
    )
    for _ in range(2):  # states are made in the first
        training.step()
    (program,), (batch,) = training.programs, training.batches
    with never_waiting(device):
        losses = [program(batch) for _ in range(2)]
    assert all(float(loss) > 0 for loss in losses)
