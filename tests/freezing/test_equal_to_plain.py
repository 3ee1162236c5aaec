"""Any mask trains as plain PyTorch does with `requires_grad` set by it, under plans that keep and that recompute."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.codegen import emit_step
from stowage.stages.freezing.units import units_of
from stowage.stages.workload.randomness import seeded
from tests.freezing.frozen import adamw, assert_frozen_training, frozen_program, momentum
from tests.matrix import some
from tests.solve.prepared import prepare_model, prepared_zoo
from tests.zoo import ZOO, Entry

MODELS = ["gpt2", "bert", "vit", "resnet", "llama", "t5", "tied", "lstm", "batchnorm", "unet"]


@pytest.mark.parametrize("kind", ["saving", "parameter", "block"])
@pytest.mark.parametrize("name", some(MODELS, exactness=["gpt2", "bert", "vit", "resnet", "tied", "lstm"]))
def test_keeping_everything(name: str, kind: str) -> None:
    prepared = prepared_zoo(name)
    assert_frozen_training(ZOO[name], prepared, prepared.solve(), units_of(prepared.trace, kind))


@pytest.mark.parametrize("name", some(MODELS, exactness=["gpt2", "bert", "vit", "resnet"]))
def test_the_tightest_plan(name: str) -> None:
    prepared = prepared_zoo(name)
    assert_frozen_training(ZOO[name], prepared, prepared.smallest(), units_of(prepared.trace))


class Mixer(nn.Module):
    """Mixes positions by linear layers of a transposed tensor, and by a weight in the order of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.channels = nn.LayerNorm(48), nn.Linear(48, 48)
        self.widen, self.narrow = nn.Linear(40, 80), nn.Linear(80, 40)
        self.weight = nn.Parameter(torch.randn(40, 40) / 6)

    def forward(self, x: torch.Tensor) -> Any:
        mixed = self.narrow(F.dropout(F.gelu(self.widen(self.norm(x).mT)), 0.1)).mT
        return self.channels(x + mixed + (x.mT @ self.weight).mT)


def mixer() -> Entry:
    with seeded(0):
        model = nn.Sequential(Mixer(), Mixer())
        return model, {"input": torch.randn(3, 40, 48)}, lambda out, batch: out.square().mean()


@pytest.mark.parametrize("make", [ZOO["transformer"], ZOO["lstm"], mixer])
def test_where_plain_pytorch_chooses_kernels_by_what_requires_gradients(make: Callable[[], Entry]) -> None:
    """Products of tensors that do not lie in order: each step has the kernels of its own mask."""
    prepared = prepare_model(make, "products", freezes=True)
    units = units_of(prepared.trace)
    solved = prepared.solve()
    for plan in (solved, prepared.smallest()):
        assert_frozen_training(make, prepared, plan, units)
    text = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, solved.slots, units)
    assert re.search(r"torch\.ops\.stowage\.matmul\.default\(.*, run\.active\(", text)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_momentum_does_not_move_what_is_frozen(name: str) -> None:
    prepared = prepared_zoo(name, "SGD")
    assert_frozen_training(ZOO[name], prepared, prepared.smallest(), units_of(prepared.trace), momentum)


def test_frozen_units_keep_weights_and_states() -> None:
    """No decay, no momentum, no count of steps: what was frozen is as if the step had not been."""
    prepared = prepared_zoo("gpt2")
    units = units_of(prepared.trace)
    model, batch, _ = ZOO["gpt2"]()
    optimizer = adamw(model)
    program = frozen_program(prepared, prepared.solve(), units, model, optimizer)
    program(batch)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    states = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in model.named_parameters()}
    trained = units[3]
    program.active.choose([trained.name])
    program(batch)
    for name, parameter in model.named_parameters():
        moved = name in trained.parameters
        assert torch.equal(parameter, before[name]) != moved
        assert parameter.grad is None
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, states[name][key]) != moved, (name, key)
