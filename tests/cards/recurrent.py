"""An LSTM as a card computes it: one operator of cuDNN's, which returns a list in its backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.ir.trace import TraceTables
from stowage.stages.trace import trace_step

aten: Any = torch.ops.aten
LSTM = 2
WIDTH, STEPS, SAMPLES = 16, 12, 4


class OnACard(nn.Module):
    """`nn.LSTM`, its weights in one buffer."""

    def __init__(self, *, layers: int = 2, bias: bool = True, flat: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        made = nn.LSTM(WIDTH, WIDTH, num_layers=layers, bias=bias, batch_first=True)
        self.layers, self.stride, self.dropout, self.flat = layers, 4 if bias else 2, dropout, flat
        if flat:
            buffer = torch.cat([w.detach().flatten() for w in made._flat_weights])
            start = 0
            for name in made._flat_weights_names:
                weight = getattr(made, name)
                weight.data = buffer[start : start + weight.numel()].view(weight.shape)
                start += weight.numel()
        self.names = list(made._flat_weights_names)
        for name in self.names:
            self.register_parameter(name, getattr(made, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [getattr(self, name) for name in self.names]
        state = x.new_zeros(self.layers, x.shape[0], WIDTH)
        buffer = None
        if self.flat:
            first: torch.Tensor = weights[0]
            total = sum(w.numel() for w in weights)
            buffer = first.detach().as_strided((total,), (1,), 0)
        form = (LSTM, WIDTH, 0, self.layers, True, self.dropout, self.training, False, [], None)
        found: torch.Tensor = aten._cudnn_rnn(x, weights, self.stride, buffer, state, state, *form)[0]
        return found


class Recurrent(nn.Module):
    """Two of them over tokens."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.first, self.second = OnACard(**how), OnACard(**how)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.head(self.second(self.dropout(self.first(self.embed(ids)))))
        return F.cross_entropy(found.flatten(0, 1), ids.flatten())


def lstm_on_a_card(*, frozen: bool = False, updated: bool = True, **how: Any) -> TraceTables:
    """A step, traced here and said to be of a card; `frozen`: its LSTMs do not train;
    `updated`: in place of leaving gradients."""
    torch.manual_seed(0)
    model = Recurrent(**how)
    for part in (model.first, model.second):
        part.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if updated else None
    ids = torch.randint(0, 8, (SAMPLES, STEPS))
    trace = trace_step(model, (ids,), loss=lambda loss, _: loss, optimizer=optimizer)
    return replace(trace, meta=replace(trace.meta, device="cuda"))
