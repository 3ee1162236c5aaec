"""`fit(..., freeze=...)`: any mask trains as plain PyTorch does with `requires_grad` set by it, within the budget."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import Freeze, Offload, fit
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.workload.samples import sample_batch
from tests.configurations.alongside import batches, small_gpt2
from tests.freezing.beside import Given, assert_equal_to_plain, assert_worst_measured, units_in
from tests.matrix import some
from tests.zoo import ZOO, loss_of

Fit = Callable[..., Any]


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, say=lambda text: None)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1)


def classifier() -> nn.Module:
    """A BERT that classifies texts, dropout on."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        configuration = transformers.BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            vocab_size=96,
            num_labels=3,
        )
        model: nn.Module = transformers.BertForSequenceClassification(configuration)
    return model.train()


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(3)
    return [
        {
            "input_ids": torch.randint(0, 96, (4, 24), generator=draws),
            "labels": torch.randint(0, 3, (4,), generator=draws),
        }
        for _ in range(count)
    ]


def outputs_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


@pytest.mark.parametrize("optimizer", [adamw, momentum])
@pytest.mark.parametrize("budget", ["150%", "65%"])
def test_gpt2(budget: str, optimizer: Any, quick: Fit) -> None:
    model, plain, policy = small_gpt2(), small_gpt2(), Given()
    given = batches(model, 3)
    step = quick(model, given[0], optimizer, device_budget=budget, freeze=Freeze(policy=policy))
    assert_equal_to_plain(step, policy, plain, optimizer(plain.parameters()), outputs_loss, given)
    assert (step.plan.recomputed_bytes > 0) == (budget == "65%")


@pytest.mark.parametrize("budget", some(["150%", "60%"], keep=["60%"]))
def test_a_classifier(budget: str, quick: Fit) -> None:
    model, plain, policy = classifier(), classifier(), Given()
    given = texts(3)
    step = quick(model, given[0], adamw, device_budget=budget, freeze=Freeze(policy=policy))
    assert_equal_to_plain(step, policy, plain, adamw(plain.parameters()), outputs_loss, given)


@pytest.mark.parametrize(("name", "budget"), some([("vit", "85%"), ("resnet", "70%"), ("batchnorm", "80%")]))
def test_pictures(name: str, budget: str, quick: Fit) -> None:
    (model, batch, loss), (plain, _, _), policy = ZOO[name](), ZOO[name](), Given()
    step = quick(model, batch, adamw, device_budget=budget, loss=loss, freeze=Freeze(policy=policy))
    own = lambda model, batch: loss_of(model, batch, loss)  # noqa: E731
    assert_equal_to_plain(step, policy, plain, adamw(plain.parameters()), own, [batch])


FROZEN = "STOWAGE_TEST_FROZEN"
"""A variable of the environment, which is not put back after a forward."""


class Mixing(nn.Module):
    """Multiplies transposed tensors, of which PyTorch chooses kernels by what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow, self.channels = nn.Linear(40, 80), nn.Linear(80, 40), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> Any:
        os.environ[FROZEN] = " ".join(name for name, p in self.named_parameters() if not p.requires_grad)
        return self.channels(x + self.narrow(self.widen(x.mT).relu()).mT)


def test_plain_pytorch_beside_it_freezes_too(quick: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take other kernels than the step, and its last bits could differ."""
    monkeypatch.setenv(FROZEN, "")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mixing()
    plain, policy, x = copy.deepcopy(model), Given(), torch.randn(3, 40, 48)
    square = lambda out, batch: out.square().mean()  # noqa: E731
    more: dict[str, Any] = {"loss": square, "check": "gradients", "freeze": Freeze(policy=policy)}
    step = quick(model, x, adamw, device_budget="150%", **more)
    units = units_in(step)
    policy.masks = [[unit.name] for unit in units]
    names = {name for name, _ in model.named_parameters()}
    for unit in units[:2]:
        step(x)
        assert set(os.environ[FROZEN].split()) == names.difference(unit.parameters)
    assert all(p.requires_grad for p in model.parameters())
    fresh = quick(copy.deepcopy(plain), x, adamw, device_budget="150%", **more | {"check": "always"})
    own = lambda model, batch: square(model(batch), batch)  # noqa: E731
    assert_equal_to_plain(fresh, policy, plain, adamw(plain.parameters()), own, [x])


@pytest.mark.parametrize("budget", ["150%", "75%"])
def test_accumulation_and_clipping(budget: str, quick: Fit) -> None:
    model, plain, policy = small_gpt2(), small_gpt2(), Given()
    given = batches(model, 4)
    half = lambda model, batch: outputs_loss(model, batch) / 2  # noqa: E731
    step = quick(
        model,
        given[0],
        adamw,
        device_budget=budget,
        forward=half,
        accumulate=2,
        max_grad_norm=0.5,
        freeze=Freeze(policy=policy),
    )
    assert_equal_to_plain(
        step, policy, plain, adamw(plain.parameters()), half, given, accumulate=2, max_grad_norm=0.5, updates=7
    )


def test_an_optimizer_that_updates_all_at_once(quick: Fit) -> None:
    from tests.optimizers.kinds import Counting

    model, plain, policy = small_gpt2(), small_gpt2(), Given()
    given = batches(model, 2)
    step = quick(model, given[0], Counting, device_budget="150%", freeze=Freeze(policy=policy))
    assert step.updates_jointly
    assert_equal_to_plain(step, policy, plain, Counting(plain.parameters()), outputs_loss, given, updates=5)


def test_offloading(quick: Fit, tmp_path: Path) -> None:
    large = {"n_embd": 512, "n_positions": 128}  # the buffers of a disk tier alone are 16 MiB
    model, plain, policy = small_gpt2(**large), small_gpt2(**large), Given()
    given = [sample_batch(model, 4, 128, seed) for seed in (0, 1)]
    step = quick(
        model,
        given[0],
        adamw,
        device_budget="60%",
        method="offmate",
        offload=Offload(tmp_path),
        freeze=Freeze(policy=policy),
    )
    assert step.plan.offload_bytes > 0
    assert_equal_to_plain(step, policy, plain, adamw(plain.parameters()), outputs_loss, given, updates=6)


def test_adapters(quick: Fit) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    from tests.configurations.test_lora import lora

    model, plain, policy = lora(), lora(), Given()
    given = batches(model, 2)
    step = quick(model, given[0], adamw, device_budget="80%", freeze=Freeze(policy=policy))
    assert all("lora" in name for unit in units_in(step) for name in unit.parameters)
    assert_equal_to_plain(step, policy, plain, adamw(plain.parameters()), outputs_loss, given, updates=5)


@pytest.mark.parametrize("units", ["saving", "parameter", "block"])
@pytest.mark.parametrize("budget", ["150%", "60%"])
def test_the_worst_mask_takes_what_was_predicted(budget: str, units: Any, quick: Fit) -> None:
    model, policy = small_gpt2(n_layer=4, n_positions=64), Given(most=2)
    batch = sample_batch(model, 8, 64, 0)
    step = quick(model, batch, adamw, device_budget=budget, freeze=Freeze(policy=policy, units=units))
    assert step.plan.active_units == 2
    assert_worst_measured(step, policy, batch)


def test_freezing_fits_where_training_everything_does_not(quick: Fit) -> None:
    model = small_gpt2(n_layer=4, n_positions=64)
    batch = sample_batch(model, 8, 64, 0)
    whole = quick(model, batch, adamw, device_budget="150%").plan
    budget = int(0.9 * whole.device_peak_bytes)
    kept = quick(
        small_gpt2(n_layer=4, n_positions=64), batch, adamw, device_budget=budget, freeze=Freeze(0.95, "prefix")
    )
    assert kept.plan.method == "keep_all"
    assert kept.plan.device_peak_bytes <= budget < kept.plan.all_active_bytes
    assert kept.plan.step_time_s < kept.plan.all_active_time_s


def test_a_budget_that_no_mask_fits_is_infeasible(quick: Fit) -> None:
    model = small_gpt2()
    with pytest.raises(Infeasible) as caught:
        quick(model, batches(model, 1)[0], adamw, device_budget="1MiB", freeze=Freeze(0.9))
    least = caught.value.smallest_feasible_bytes
    again = small_gpt2()
    step = quick(again, batches(again, 1)[0], adamw, device_budget=least, freeze=Freeze(0.9))
    assert step.plan.device_peak_bytes <= least


@pytest.mark.long
def test_budgets_that_are_searched_for(quick: Fit) -> None:
    """`smallest` has no plan with a byte less; `+5%` is relative to the mean time with everything kept."""
    found = {}
    for asked in ("smallest", "+5%"):
        model = small_gpt2()
        step = quick(model, batches(model, 1)[0], adamw, device_budget=asked, freeze=Freeze(0.9))
        found[asked] = plan = step.plan
        assert plan.units > plan.active_units > 0
        assert plan.device_peak_bytes <= plan.device_budget_bytes
    assert found["smallest"].device_budget_bytes <= found["+5%"].device_budget_bytes
    assert found["+5%"].step_time_s <= 1.05 * found["+5%"].keep_all_time_s
    model, below = small_gpt2(), found["smallest"].device_budget_bytes - 1
    with pytest.raises(Infeasible):
        quick(model, batches(model, 1)[0], adamw, device_budget=below, freeze=Freeze(0.9))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"freeze": 0.9}, r"freeze is 0\.9: give Freeze"),
        ({"freeze": Freeze(), "optimizer": None}, "freeze leaves parameters out of updates, but there is no optimizer"),
    ],
)
def test_sentences(arguments: dict[str, Any], sentence: str, quick: Fit) -> None:
    model = small_gpt2()
    given = {"optimizer": adamw, "device_budget": "150%"} | arguments
    with pytest.raises(ParameterError, match=sentence):
        quick(model, batches(model, 1)[0], **given)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"rate": 1.5}, r"freeze\.rate is 1\.5"),
        ({"policy": "best"}, r"freeze\.policy is 'best'"),
        ({"policy": 3}, r"freeze\.policy is a int"),
        ({"units": "layer"}, r"freeze\.units is 'layer'"),
        ({"distance": "l2"}, r"freeze\.distance is 'l2'"),
        ({"seed": 0.5}, r"freeze\.seed is 0\.5"),
    ],
)
def test_sentences_of_freeze(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence):
        Freeze(**wrong)


def test_a_policy_that_trains_too_much_is_refused(quick: Fit) -> None:
    model, policy = small_gpt2(), Given(most=1)
    batch = batches(model, 1)[0]
    step = quick(model, batch, adamw, device_budget="150%", freeze=Freeze(policy=policy))
    policy.masks = [[unit.name for unit in units_in(step)]]
    with pytest.raises(
        ParameterError, match=r"The policy Given trains \d+ units in step 0, and memory was planned for 1"
    ):
        step(batch)
    policy.masks = [["nothing"]]
    with pytest.raises(ParameterError, match="The policy Given trains 'nothing', which is no unit"):
        step(batch)


def test_units_that_the_optimizer_lacks_do_not_train_for_ever(quick: Fit) -> None:
    """What was never updated has not moved, so that the policy turns to what is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
    batch = torch.randn(4, 8)
    freeze = Freeze(0.6, "ils")
    step = quick(model, batch, optimizer, device_budget="1MiB", loss=lambda out, _: out.square().mean(), freeze=freeze)
    before = model[4].weight.detach().clone()
    for _ in range(4):
        step(batch)
    assert not torch.equal(model[4].weight, before)
