"""Values in the host's memory of a step that computes on a card, recorded on tensors without memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stowage.stages.ir.errors import TraceError
from stowage.stages.ir.trace import Constant, Value
from stowage.stages.ir.updates import pinned
from stowage.stages.kernels import Form
from stowage.stages.profile.arguments import constant_of, place_of
from stowage.stages.runtime.program import constant_tensors
from stowage.stages.trace import trace_step
from stowage.stages.trace.checks import check_parameters

CARD = torch.device("meta")
"""In the place of a GPU: a device without memory that is not the host."""


class Scaled(nn.Module):
    """Multiplies by a number that the host has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((), 0.3)
        out: torch.Tensor = self.linear(x) * scale
        return out


def value(on_host: bool) -> Value:
    return Value(0, 0, -1, 0, "float32", (), (), 0, "c0", "constant:c0", on_host)


def test_constants_stay_where_they_were() -> None:
    """A kernel that takes a number from the host rounds it otherwise than one that reads it from the device."""
    content = Constant(0, torch.tensor(0.1).numpy().tobytes())
    assert constant_tensors([content], [value(True)], CARD)["c0"].device.type == "cpu"
    assert constant_tensors([content], [value(False)], CARD)["c0"].device == CARD


def test_made_up_values_too() -> None:
    assert place_of(value(True), CARD).type == "cpu"
    assert place_of(value(False), CARD) == CARD


def test_devices_among_arguments() -> None:
    """What is made on the host in the step is made there when it is measured."""
    assert constant_of("device", "cpu", CARD).type == "cpu"
    assert constant_of("device", "cuda:0", CARD) == CARD
    assert constant_of("device", "cuda:1", CARD) == CARD


def test_nothing_of_the_host_is_moved() -> None:
    trace = trace_step(Scaled(), (torch.randn(4, 8),), loss=lambda out, _: out.sum())
    assert not any(v.on_host for v in trace.values), "on a CPU nothing is elsewhere"
    assert pinned(trace) == frozenset()
    number = next(v for v in trace.values if v.shape == () and trace.calls[v.call].target.startswith("aten.full"))
    values = [replace(v, on_host=v.storage == number.storage) for v in trace.values]
    assert pinned(replace(trace, values=values)) == {number.storage}


def test_parameters_that_share_memory_stay() -> None:
    """As an LSTM's do on a card: one that leaves would give nothing back."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    flat = torch.randn(128)
    for index in (0, 1):
        model[index].weight.data = flat[64 * index : 64 * (index + 1)].view(8, 8)  # type: ignore[union-attr]
    trace = trace_step(model, (torch.randn(4, 8),), loss=lambda out, _: out.sum())
    sources = {v.source: v.storage for v in trace.values if v.source.startswith("parameter:")}
    assert sources["parameter:0.weight"] == sources["parameter:1.weight"] != sources["parameter:2.weight"]
    assert pinned(trace) == {sources["parameter:0.weight"]}


def test_forms_say_nothing_of_places() -> None:
    assert Form.of(torch.zeros(2)) == Form.of(torch.zeros(2, device="meta"))


class OnAnother(nn.Parameter):
    """A parameter that says it is on a card."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


def test_a_model_is_on_one_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_parameters(model)
    model[1]._parameters["bias"] = OnAnother(torch.zeros(2))
    with pytest.raises(TraceError, match=r"several devices \('0\.weight' on cpu, '1\.bias' on cuda:1\)"):
        check_parameters(model)
