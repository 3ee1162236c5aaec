"""Models of the zoo train under its tightest plan with the numbers of plain PyTorch."""

from __future__ import annotations

import pytest

from stowage.stages.ir.activations import device_budget, fixed_bytes
from tests.matrix import some
from tests.runtime.beside_eager import adamw, assert_equal_training, prepare
from tests.solve.prepared import prepare_model, prepared_zoo
from tests.zoo import REMAT, ZOO

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
"""The rest of the zoo is trained through `fit` in tests/api."""


@pytest.mark.parametrize("name", some(NAMES, exactness=["gpt2", "resnet", "tied", "lstm", "transformer"]))
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


@pytest.mark.parametrize("name", some(REMAT, keep=["unet", "lstm", "mixer"]))
def test_any_graph_within_half_and_the_least_of_its_activation_budget(name: str) -> None:
    """Half of the activation budget that keeping everything needs, and the smallest feasible one."""
    prepared = prepare_model(REMAT[name], name, levels=0)
    whole = prepared.solve().summary
    half = device_budget(fixed_bytes(prepared.trace), whole.keep_all_peak_bytes, 0.5)
    for budget in (half, whole.smallest_feasible_bytes):
        solved = prepared.solve(budget)
        assert solved.summary.recomputed_bytes > 0
        prepared.judge(solved, budget)
        assert_equal_training(REMAT[name], prepared, solved, optimizer=adamw)
