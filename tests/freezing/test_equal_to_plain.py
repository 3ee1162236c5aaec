"""Any mask trains as plain PyTorch does with `requires_grad` set by it, under plans that keep and that recompute."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from stowage.stages.codegen import emit_step
from stowage.stages.freezing.units import units_of
from tests.freezing.chosen_kernels import mixer, normalised, projected, scan, spectral, windows
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


@pytest.mark.parametrize(
    "make",
    [
        ZOO["transformer"],
        ZOO["lstm"],
        mixer,
        scan,
        partial(scan, 1),
        windows,
        partial(windows, network=True),
        partial(windows, dtype=torch.bfloat16),
        projected,
        partial(projected, 1),
        normalised,
        partial(normalised, 1),
        spectral,
        partial(spectral, 1),
    ],
)
def test_where_plain_pytorch_chooses_kernels_by_what_requires_gradients(make: Callable[[], Entry]) -> None:
    """Products of tensors that do not lie in order, and attention: each step has the kernels of its own mask."""
    prepared = prepare_model(make, "products", freezes=True)
    units = units_of(prepared.trace)
    solved = prepared.solve()
    for plan in (solved, prepared.smallest()):
        assert_frozen_training(make, prepared, plan, units)
    text = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, solved.slots, units)
    assert re.search(r"torch\.ops\.stowage\.(matmul|attention)\.default\(.*, run\.active\(", text)


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
