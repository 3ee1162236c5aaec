"""Every model of the zoo trains in eager PyTorch, twice with the same numbers, and can be described."""

from __future__ import annotations

import copy

import pytest
import torch

from stowage.stages.workload import batch_signature, model_signature
from tests.zoo import ZOO, loss_of


@pytest.mark.parametrize("name", ZOO)
def test_trains_and_is_reproducible(name: str) -> None:
    state = torch.get_rng_state()
    runs = []
    for _ in range(2):
        model, batch, loss = ZOO[name]()
        assert torch.equal(torch.get_rng_state(), state), "building changed the global generator"
        with torch.random.fork_rng():
            torch.manual_seed(7)
            value = loss_of(model, batch, loss)
            torch.autograd.backward(value)
        assert model.training
        assert value.shape == ()
        assert torch.isfinite(value)
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert set(grads) == {n for n, p in model.named_parameters() if p.requires_grad}
        runs.append((value, grads))
    (first, first_grads), (second, second_grads) = runs
    assert torch.equal(first, second)
    assert all(torch.equal(first_grads[n], second_grads[n]) for n in first_grads)


@pytest.mark.parametrize("name", ZOO)
def test_signatures_do_not_change_by_training(name: str) -> None:
    model, batch, loss = ZOO[name]()
    before = model_signature(model), batch_signature(copy.deepcopy(batch))
    with torch.random.fork_rng():
        torch.autograd.backward(loss_of(model, batch, loss))
    assert before[0].differences(model_signature(model)) == []
    assert before[1].differences(batch_signature(batch)) == []


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "lstm", "batchnorm", "transformer"])
def test_dropout_is_on_where_the_model_has_it(name: str) -> None:
    model, batch, loss = ZOO[name]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(loss_of(model, batch, loss), loss_of(model, batch, loss))
