"""Four ranks train in every state of the groups as plain PyTorch with the same collectives, bit for bit.

They have DDP's gradients and weights within a bound: they add in another order than DDP's all-reduce does. In which
state a group is changes no sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stowage import shard
from tests.matrix import some
from tests.sharding.beside_ddp import ITERATIONS, OPTIMIZERS, STATES, differences, sharded, state_of, train
from tests.sharding.beside_reduced import under_collectives
from tests.sharding.processes import on_ranks
from tests.zoo import ZOO

GRADIENT_BOUND = 1e-5
"""Of a tensor's largest gradient, in the last iteration: 2.3e-6 here."""

WEIGHT_BOUND = 2e-5
"""A five-hundredth of an update, whose rate is 0.01: 5.6e-6 here."""

Tensors = dict[str, torch.Tensor]


def _whole(model: nn.Module) -> tuple[Tensors, Tensors]:
    """Return gradients and weights, whole."""

    def of(tensor: Any) -> torch.Tensor:
        full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.detach().clone()

    return {n: of(p.grad) for n, p in model.named_parameters()}, {n: of(p) for n, p in model.named_parameters()}


def _trained(state: str, stores: Path) -> tuple[list[float], Tensors, Tensors]:
    model, batch, loss = ZOO["gpt2"]()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    called: nn.Module = model
    if state:
        shard(model, batch, optimizer, device_budget="1GiB", choices=state_of(state), cache_dir=stores)
    else:
        called = DistributedDataParallel(model)
    losses = train(called, optimizer, batch, loss, ITERATIONS)
    return losses, *_whole(model)


def _apart(ours: Tensors, theirs: Tensors, *, relative: bool) -> dict[str, float]:
    """Return the largest difference of each tensor."""
    return {
        name: float((ours[name] - theirs[name]).abs().max() / (theirs[name].abs().max() if relative else 1.0))
        for name in ours
    }


def _all(stores: Path) -> dict[str, Any]:
    losses, gradients, weights = _trained("", stores)
    found: dict[str, Any] = {"states": {}}
    first: tuple[list[float], Tensors, Tensors] | None = None
    for state in STATES:
        ours = _trained(state, stores)
        first = first or ours
        found["states"][state] = ours[0] == first[0] and all(
            torch.equal(mine[name], one[name]) for mine, one in zip(ours[1:], first[1:], strict=True) for name in mine
        )
    assert first is not None
    found["losses"] = max(abs(a - b) for a, b in zip(first[0], losses, strict=True))
    found["gradients"] = _apart(first[1], gradients, relative=True)
    found["weights"] = _apart(first[2], weights, relative=False)
    return found


@pytest.mark.long
def test_gradients_are_the_same_in_all_states_and_near_those_of_ddp(fit_stores: Path) -> None:
    for found in on_ranks(4, _all, fit_stores):
        assert found["states"] == dict.fromkeys(STATES, True)
        assert found["losses"] < WEIGHT_BOUND
        for name, apart in found["gradients"].items():
            assert apart <= GRADIENT_BOUND, (name, apart)
        for name, apart in found["weights"].items():
            assert apart <= WEIGHT_BOUND, (name, apart)


def _beside_collectives(name: str, kind: str, stores: Path) -> dict[str, list[str]]:
    """Return for each state what differs."""
    found: dict[str, list[str]] = {}
    expected = None
    for state in STATES:
        ours = sharded(name, kind, state, stores)
        expected = expected or under_collectives(name, kind, ours.parameters)
        losses, content = expected
        assert len(losses) == ITERATIONS
        found[state] = [f"loss {i}" for i, (a, b) in enumerate(zip(ours.losses, losses, strict=True)) if a != b]
        found[state] += differences(ours.content, content)
    return found


CASES = [
    ("gpt2", "adamw"),
    ("gpt2", "sgd"),
    ("llama_lora", "adamw"),
    ("t5", "adamw"),
    ("resnet", "sgd"),
    ("batchnorm", "adamw"),
    ("gpt2_frozen", "lion"),
]


@pytest.mark.parametrize(("name", "kind"), some(CASES, keep=[]))
def test_they_train_as_the_same_collectives_do_on_whole_gradients(name: str, kind: str, fit_stores: Path) -> None:
    """Losses, weights, states and buffers over all iterations."""
    for found in on_ranks(4, _beside_collectives, name, kind, fit_stores):
        assert found == {state: [] for state in STATES}
