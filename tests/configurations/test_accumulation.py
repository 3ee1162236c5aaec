"""Gradient accumulation: several micro-batches, one update, the numbers of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.lossy import Lossy
from stowage.stages.workload.randomness import seeded
from tests.configurations.alongside import Plain, assert_equal, assert_measured, batches, small_gpt2
from tests.matrix import some
from tests.runtime.beside_eager import same

Fit = Callable[..., Any]


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, device_budget="150%", say=lambda text: None)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def a_part(count: int) -> Callable[[Any, Any], torch.Tensor]:
    return lambda outputs, batch: outputs.loss / count


@pytest.mark.parametrize(
    ("max_grad_norm", "count"), some(product([None, 0.5], [2, 3]), keep=[(0.5, 2)], exactness=[(0.5, 2)])
)
def test_equal_to_eager(max_grad_norm: float | None, count: int, quick: Fit) -> None:
    model, other = small_gpt2(), small_gpt2()
    given = batches(model, 3 * count)
    step = quick(
        model,
        given[0],
        adamw,
        loss=a_part(count),
        accumulate=count,
        max_grad_norm=max_grad_norm,
        method="rockmate",
        device_budget="80%",
    )
    plain = Plain(other, adamw(other.parameters()), a_part(count), max_grad_norm)
    assert_equal(step, plain, given, [(i + 1) % count == 0 for i in range(len(given))])
    recomputed = []
    for i in range(count):
        assert_measured(step, given[i], update=i == count - 1)
        recomputed.append(step.plan.recomputed_bytes)
    assert max(recomputed) > 0


def test_gradients_wait_where_people_look_for_them(quick: Fit) -> None:
    model, other = small_gpt2(), small_gpt2()
    given = batches(model, 2)
    step = quick(model, given[0], adamw, accumulate=2)
    plain = Plain(other, adamw(other.parameters()))
    torch.manual_seed(0)
    step(given[0], update=False)
    torch.manual_seed(0)
    plain(given[0], update=False)
    assert all(p.grad is not None for p in model.parameters())
    assert all(same(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters()))
    step(given[1])
    assert all(p.grad is None for p in model.parameters())


def test_the_number_of_micro_batches_may_change(quick: Fit) -> None:
    """Also undeclared, in other shapes, with a gradient of the user's own."""
    model, other = small_gpt2(), small_gpt2()
    long, short = batches(model, 3), batches(model, 2, rows=3, length=8)
    given = [long[0], short[0], long[1], short[1], long[2], short[0]]
    step = quick(model, long[0], adamw)
    plain = Plain(other, adamw(other.parameters()))
    for m in (model, other):
        m.get_parameter("transformer.wpe.weight").grad = torch.full_like(m.get_parameter("transformer.wpe.weight"), 0.5)
    assert_equal(step, plain, given, [False, True, True, False, False, True])


def test_zeroed_gradients_are_added_to(quick: Fit) -> None:
    model, other = small_gpt2(), small_gpt2()
    given = batches(model, 1)
    step = quick(model, given[0], adamw)
    for m in (model, other):
        for parameter in m.parameters():
            parameter.grad = torch.zeros_like(parameter)
    assert_equal(step, Plain(other, adamw(other.parameters())), given, [True])


class EitherBranch(nn.Module):
    """One of two layers, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, second: bool) -> Any:
        return self.last(torch.tanh((self.second if second else self.first)(x))).pow(2).mean()


@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_a_gradient_of_an_earlier_micro_batch_alone(max_grad_norm: float | None, quick: Fit) -> None:
    with seeded(0):
        model, other = EitherBranch(), EitherBranch()
    other.load_state_dict(model.state_dict())
    given = [{"x": torch.randn(4, 8), "second": i % 2 == 1} for i in range(4)]
    step = quick(model, given[0], adamw, max_grad_norm=max_grad_norm, device_budget="150%")
    plain = Plain(other, adamw(other.parameters()), lambda outputs, batch: outputs, max_grad_norm)
    assert_equal(step, plain, given, [False, True, False, True])


def test_percentages_are_of_the_last_micro_batch(quick: Fit) -> None:
    model = small_gpt2()
    given = batches(model, 3)
    step = quick(model, given[0], adamw, accumulate=3, device_budget="110%")
    budgets = set()
    for update in (False, False, True):
        step(given[0], update=update)
        budgets.add(step.plan.device_budget_bytes)
    assert len(budgets) == 1
    alone = quick(small_gpt2(), given[0], adamw, device_budget="110%")
    assert alone.plan.device_budget_bytes < budgets.pop()


def test_gradients_that_wait_are_in_the_plan(quick: Fit) -> None:
    model = small_gpt2()
    given = batches(model, 1)
    gradients = sum(p.nbytes for p in model.parameters())
    step = quick(model, given[0], adamw, accumulate=3)
    baselines = []
    for update in (False, False, True):
        step(given[0], update=update)
        baselines.append(step.plan.baseline_bytes)
    assert baselines[1] == baselines[2] == baselines[0] + gradients
    rows, storages = step.planned.rows, step.planned.trace.storages
    freed = [r.storage for r in rows if r.action == "free" and storages[r.storage].role == "gradient"]
    assert sorted(freed) == [s.storage for s in storages if s.role == "gradient"], "each is freed after its update"
    assert 'run.gradient["transformer.wte.weight"]' in step.planned.source
    assert "grad_transformer_wte_weight.add_(" in step.planned.source


@pytest.mark.parametrize(
    ("count", "lossy"),
    [
        pytest.param(2, None, marks=pytest.mark.long),
        pytest.param(4, Lossy(["bf16", "fixed8", "int8", "int8_group", "int4_group"]), marks=pytest.mark.long),
    ],
)
def test_a_budget_that_only_the_first_micro_batch_fits_is_refused_at_once(
    count: int, lossy: Lossy | None, quick: Fit
) -> None:
    model = small_gpt2()
    given = batches(model, 1)

    def least(**given_too: Any) -> int:
        with pytest.raises(Infeasible) as caught:
            quick(model, given[0], adamw, lossy=lossy, device_budget=1, **given_too)
        named = caught.value.smallest_feasible_bytes
        quick(model, given[0], adamw, lossy=lossy, device_budget=named, **given_too)
        return named

    first, all_of_them = least(), least(accumulate=count)
    assert first < all_of_them
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(Infeasible):
        quick(model, given[0], adamw, accumulate=count, lossy=lossy, device_budget=first)
    for name, p in model.named_parameters():
        assert (p.data_ptr(), p.grad) == (before[name][0], None), "what is refused moves nothing"
        assert torch.equal(p, before[name][1])


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "4"])
def test_a_number_that_is_none(count: Any, quick: Fit) -> None:
    model = small_gpt2()
    with pytest.raises(ParameterError, match="number of micro-batches") as caught:
        quick(model, batches(model, 1)[0], adamw, accumulate=count)
    assert "\n" not in str(caught.value)
