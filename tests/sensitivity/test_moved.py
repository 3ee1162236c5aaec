"""Weights that are moved a little, on copies, where one batch is all there is to measure on."""

from __future__ import annotations

import pytest
import torch

from stowage.stages.sensitivity import StepTensors
from stowage.stages.sensitivity.moved import DISTANCE, moved
from tests.zoo import ZOO


def test_weights_move_by_a_share_of_their_size_and_the_models_own_stay() -> None:
    model, batch, _ = ZOO["gpt2"]()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    live = StepTensors.of(model, batch)
    other = moved(live, 0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for name, weights in before.items():
        distance = torch.linalg.vector_norm(other.parameters[name] - weights) / torch.linalg.vector_norm(weights)
        assert not weights.any() or 0.5 * DISTANCE < distance < 2 * DISTANCE
    assert other.parameters["lm_head.weight"] is other.parameters["transformer.wte.weight"], "tied weights stay tied"
    assert other.inputs is live.inputs
    again, another = moved(live, 0), moved(live, 1)
    assert all(torch.equal(p, again.parameters[name]) for name, p in other.parameters.items())
    assert any(not torch.equal(p, another.parameters[name]) for name, p in other.parameters.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.int8, torch.float8_e4m3fn])
def test_weights_of_any_type(dtype: torch.dtype) -> None:
    """Those that no normal draws can be added to stay as they are; one without elements does no harm."""
    weights, none = torch.ones(64).to(dtype), torch.ones(0, 3)
    found = moved(StepTensors({"w": weights, "none": none}, {}, []), 0).parameters
    assert found["w"].dtype == dtype
    assert found["none"].shape == (0, 3)
    assert (found["w"].data_ptr() != weights.data_ptr()) == (dtype in (torch.bfloat16, torch.complex64))
    assert bool(found["w"].to(torch.complex64).isfinite().all())


def test_parameters_that_share_memory_without_being_one_object() -> None:
    """Two names of the same weights, and a slice of them, move together."""
    weights = torch.randn(6, 4)
    same, row = weights.detach(), weights[2]
    found = moved(
        StepTensors({"weights": weights, "same": same, "row": row, "own": torch.ones(3)}, {}, []), 0
    ).parameters
    assert torch.equal(found["weights"], found["same"])
    assert torch.equal(found["weights"][2], found["row"])
    assert not torch.equal(found["weights"], weights)
    assert found["weights"].untyped_storage().data_ptr() != weights.untyped_storage().data_ptr()
    found["row"].zero_()
    assert not found["same"][2].any()
    assert weights[2].any()


def test_an_expanded_parameter_follows_what_it_shares() -> None:
    one = torch.randn(1, 3)
    found = moved(StepTensors({"one": one, "many": one.expand(5, 3)}, {}, []), 0).parameters
    assert not torch.equal(found["one"], one)
    assert torch.equal(found["many"], found["one"].expand(5, 3))
