"""Models of the zoo train under its tightest plan with the numbers of plain PyTorch."""

from __future__ import annotations

import pytest

from tests.runtime.beside_eager import adamw, assert_equal_training, prepare
from tests.solve.prepared import prepared_zoo
from tests.zoo import ZOO

NAMES = [
    "gpt2",
    "gpt2_mask",
    "gpt2_frozen",
    "llama",
    "resnet",
    "resnet_transformers",
    "batchnorm",
    "transformer",
    "tied",
    "lstm",
    "dropout_zero",
    "in_place",
    "y_sum",
    "two_outputs",
    "optional_inputs",
    "returns_input",
]
"""The rest of the zoo is trained through `fit` in tests/fit."""


@pytest.mark.parametrize("name", NAMES)
def test_the_tightest_plan(name: str) -> None:
    prepared = prepared_zoo(name)
    solved = prepared.smallest()
    assert_equal_training(ZOO[name], prepared, solved, optimizer=adamw)


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "batchnorm", "transformer"])
def test_the_tightest_plan_recomputes(name: str) -> None:
    """Else the test above would say nothing."""
    prepared = prepared_zoo(name)
    solved = prepared.smallest()
    again = [prepared.nodes[r.node] for r in solved.rows if r.recompute]
    assert solved.summary.recomputed_bytes > 0
    if name not in ("resnet", "batchnorm"):
        assert any(n.random for n in again), "a dropout mask is drawn again"
    if name in ("resnet", "batchnorm"):
        assert any(n.mutates for n in again), "batch statistics are computed again"


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_keeping_everything(name: str) -> None:
    prepared = prepared_zoo(name)
    assert_equal_training(ZOO[name], prepared, prepared.solve(), optimizer=adamw, iterations=2)


@pytest.mark.parametrize("name", ["gpt2", "tied", "y_sum", "resnet"])
def test_without_an_optimizer_gradients_stay_and_add_up(name: str) -> None:
    prepared = prepare(ZOO[name], None)
    assert_equal_training(ZOO[name], prepared, prepared.smallest(), optimizer=None)
