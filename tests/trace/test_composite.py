"""A part of a step in inference mode runs the kernels of eager, not those of compositions in Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.trace.step import record_step


class Taught(nn.Module):
    """Compares its output with that of a teacher, in a mode without gradients."""

    def __init__(
        self, teacher: Callable[[torch.Tensor], torch.Tensor], mode: type[AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.student, self.mode = nn.Linear(8, 1), mode
        self.teacher = teacher if isinstance(teacher, nn.Module) else _Function(teacher)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        with self.mode():
            taught = self.teacher(x)
            taught = taught[0] if isinstance(taught, tuple) else taught
        return self.student(x).mean() - taught.clone().mean()


class _Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class _Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x[0])[0]


TEACHERS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "bilinear": lambda: lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "bicubic": lambda: lambda x: F.interpolate(x, size=(5, 5), mode="bicubic", antialias=True),
    "nearest": lambda: lambda x: F.interpolate(x, scale_factor=1.5),
    "gru": lambda: _Recurrent(nn.GRU(8, 6, bidirectional=True)),
    "rnn": lambda: _Recurrent(nn.RNN(8, 6, 2)),
    "lstm": lambda: _Recurrent(nn.LSTM(8, 6)),
    "turned product": lambda: lambda x: x.mT @ torch.ones(6, 3),
    "stft": lambda: lambda x: torch.stft(x[0, 0].flatten(), 8, return_complex=True, window=torch.ones(8)).abs(),
    "chunks": lambda: lambda x: torch.unsafe_chunk(x, 2, 3)[1],
}


@pytest.mark.parametrize("teacher", TEACHERS)
def test_inference_mode_has_the_calls_of_no_grad(teacher: str) -> None:
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        model = Taught(TEACHERS[teacher](), mode)
        recorded = record_step(model, (torch.randn(2, 3, 6, 8),), loss=lambda out, batch: out)
        found.append(
            [call.target for call in recorded.calls if not call.target.endswith(("detach.default", "alias.default"))]
        )
    assert found[0] == found[1]
