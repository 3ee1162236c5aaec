"""Any mask trains as plain PyTorch does with `requires_grad` set by it, under plans that keep and that recompute."""

from __future__ import annotations

import pytest

from stowage.stages.freezing.units import units_of
from tests.freezing.frozen import adamw, assert_frozen_training, momentum
from tests.matrix import some
from tests.solve.prepared import prepared_zoo
from tests.zoo import ZOO

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


def test_where_plain_pytorch_chooses_kernels_by_what_requires_gradients() -> None:
    """`nn.Transformer` multiplies matrices that do not lie in order, of which PyTorch computes one kind or another
    after `requires_grad`: the plan has the numbers of the step in which everything does."""
    prepared = prepared_zoo("transformer")
    units = units_of(prepared.trace)
    for solved in (prepared.solve(), prepared.smallest()):
        assert_frozen_training(ZOO["transformer"], prepared, solved, units, dropped=True)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_momentum_does_not_move_what_is_frozen(name: str) -> None:
    prepared = prepared_zoo(name, "SGD")
    assert_frozen_training(ZOO[name], prepared, prepared.smallest(), units_of(prepared.trace), momentum)


def test_frozen_units_keep_weights_and_states() -> None:
    """No decay, no momentum, no count of steps: what was frozen is as if the step had not been."""
    import torch

    from tests.freezing.frozen import frozen_program

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
