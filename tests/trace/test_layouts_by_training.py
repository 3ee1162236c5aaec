"""Where results must lie as in plain PyTorch for the calls that follow to have its kernels."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.ir.by_training import BY_TRAINING
from stowage.stages.ir.sums import SUM, takes_of
from stowage.stages.trace.step import Recorded, record_step, trace_step
from tests.freezing.chosen_kernels import projected, scan, windows
from tests.zoo import ZOO, Entry


class Scaled(nn.Module):
    """What a weight on the left multiplies is scaled before it is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.weight = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), nn.Parameter(torch.eye(8))

    def forward(self, input: torch.Tensor) -> Any:
        return self.weight @ (self.first(input) * self.scale).mT


class Normed(nn.Module):
    """Keys are normalised before attention with a bias that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.bias = nn.Linear(8, 8), nn.Parameter(torch.zeros(4, 4))

    def forward(self, input: torch.Tensor) -> Any:
        k = F.normalize(self.key(input).view(-1, 4, 2, 4).transpose(1, 2), dim=-1)
        return F.scaled_dot_product_attention(k, k, k, attn_mask=self.bias)


def recorded(entry: Entry) -> Recorded:
    model, batch, loss = entry
    return record_step(model, batch, loss=loss, freezes=True)


def small(model: type[nn.Module], samples: int) -> Entry:
    return model(), {"input": torch.randn(samples, 4, 8)}, lambda out, batch: out.square().mean()


def own_layouts(found: Recorded) -> dict[str, list[Any]]:
    """What the calls of each operator say of their layout, in order."""
    calls: dict[str, list[Any]] = {}
    for call in found.calls:
        if call.target in BY_TRAINING:
            calls.setdefault(call.target, []).append(json.loads(call.arguments)["args"][-3])
    return calls


@pytest.mark.parametrize("make", [scan, projected, ZOO["transformer"]])
def test_where_a_copy_follows_results_lie_in_one_way(make: Any) -> None:
    found = recorded(make())
    assert found.notices == []
    own = own_layouts(found)
    assert not any(own.get("stowage.matmul_input_gradient.default", []))
    assert not any(own.get("stowage.attention.default", []))
    assert not any(map(any, own.get("stowage.attention_gradients.default", [])))


def test_of_one_sample_some_lie_by_what_trains() -> None:
    """No copy makes rows out of the turned gradient of one matrix."""
    found = own_layouts(recorded(projected(1)))
    assert found["stowage.attention_gradients.default"] == [[False, True, False]] * 2, "keys alone"
    assert not any(found["stowage.attention.default"])
    assert any(own_layouts(recorded(scan(1)))["stowage.matmul_input_gradient.default"])


class Asking(torch.autograd.Function):
    """Computes its gradient by how the one that it gets lies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient * 2 if gradient.is_contiguous() else gradient + gradient


class Asked(Scaled):
    def forward(self, input: torch.Tensor) -> Any:
        return self.weight @ Asking.apply(self.first(input)).mT  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("model", [Scaled, Normed])
def test_what_is_computed_with_results_is_copied_in_both_cases(model: type[nn.Module], samples: int) -> None:
    """Or in none."""
    assert recorded(small(model, samples)).notices == []


@pytest.mark.parametrize(("samples", "copies"), [(1, 0), (2, 1)])
def test_a_copy_that_only_frozen_weights_need_is_made_always(samples: int, copies: int) -> None:
    """Rows of one matrix lie in either order; of two, those of a frozen weight's gradient must be copied."""
    calls = recorded(small(Scaled, samples)).calls
    made_by = {value: call.target for call in calls for value in call.returns}
    copied = [made_by.get(call.reads[0]) for call in calls if call.target == "aten.clone.default"]
    assert copied.count("aten.mul.Tensor") == copies


def test_calls_that_depend_on_layouts_are_told() -> None:
    (notice,) = recorded(small(Asked, 2)).notices
    assert "Backward computes with other kernels in plain PyTorch" in notice
    assert own_layouts(recorded(small(Asked, 2))) == {}


def test_what_follows_has_the_layouts_of_plain_pytorch() -> None:
    """Where nothing is copied in either case, and where it is stacked."""
    for entry in (small(Scaled, 1), windows()):
        found = recorded(entry)
        assert found.notices == []
        (gradients,) = (said for name, said in own_layouts(found).items() if "gradient" in name)
        assert all(gradients[0] if isinstance(gradients[0], list) else gradients)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_sum_is_written_over_its_second_summand_only_where_both_lie_in_one_way(samples: int) -> None:
    model, batch, loss = scan(samples)
    trace = trace_step(model, batch, loss=loss, freezes=True)
    assert trace.lies_by_training == (samples == 1)
    taken = {
        call.reads.index(next(v for v in call.reads if trace.values[v].storage == storage))
        for call in trace.calls
        if call.target == SUM
        for storage in takes_of([call], trace)
    }
    assert taken == ({0} if samples == 1 else {0, 1})
