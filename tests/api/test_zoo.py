"""`fit` on the zoo: equal to plain PyTorch bit for bit, within the budget, and as large as predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stowage.flows import fit
from stowage.stages.ir.errors import MIB, Infeasible
from tests.matrix import some
from tests.zoo import ZOO, loss_of

ITERATIONS = 5
MODELS = [
    "gpt2",
    "llama",
    "mistral",
    "phi",
    "bloom",
    "bert",
    "vit",
    "resnet",
    "t5",
    "transformer",
    "unet",
    "tied",
    "lstm",
    "two_outputs",
    "gpt2_frozen",
    "y_sum",
    "gpt2_bf16",
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all models."""
    return tmp_path_factory.mktemp("stores")


@pytest.mark.parametrize(
    "name",
    some(
        MODELS,
        keep=["gpt2", "resnet", "unet", "tied", "lstm"],
        exactness=["gpt2_bf16", "resnet"],
    ),
)
def test_equal_to_eager_within_the_budget(name: str, stores: Path) -> None:
    torch.manual_seed(0)
    model, batch, loss = ZOO[name]()
    torch.manual_seed(0)
    eager, _, _ = ZOO[name]()

    def adamw(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)  # type: ignore[arg-type]

    with pytest.raises(Infeasible) as found:
        fit(model, batch, adamw, device_budget=1, loss=loss, method="rockmate", cache_dir=stores, quick=True)
    smallest = found.value.smallest_feasible_bytes
    whole = fit(
        model, batch, adamw, device_budget="200%", loss=loss, cache_dir=stores, quick=True
    ).plan.device_peak_bytes
    budget = smallest + (whole - smallest) // 10
    step = fit(model, batch, adamw, device_budget=budget, loss=loss, method="rockmate", cache_dir=stores, quick=True)
    plan = step.plan
    assert plan.recomputed_bytes >= plan.activation_bytes / 3

    optimizer = adamw(eager.parameters())
    before = {n: p.detach().clone() for n, p in eager.named_parameters()}
    torch.manual_seed(1)
    expected = []
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        value = loss_of(eager, batch, loss)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(value.item())
    random_after = torch.get_rng_state()

    torch.manual_seed(1)
    losses = [step(batch).item() for _ in range(ITERATIONS - 1)]
    measured = step.measure(batch)
    losses.append(measured.loss)

    assert losses == expected
    assert torch.equal(torch.get_rng_state(), random_after)
    theirs, ours = dict(eager.named_parameters()), dict(model.named_parameters())
    assert [n for n in theirs if not torch.equal(theirs[n], ours[n])] == []
    assert [n for n, p in ours.items() if p.requires_grad and torch.equal(p, before[n])] == [], "every parameter moves"
    assert all(torch.equal(a, b) for a, b in zip(eager.buffers(), model.buffers(), strict=True))
    assert step.optimizer is not None
    states, expected_states = step.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    assert states.keys() == expected_states.keys()
    for index, state in expected_states.items():
        assert all(torch.equal(state[k], states[index][k]) for k in state)

    assert measured.peak_bytes <= budget
    assert abs(measured.peak_bytes - plan.device_peak_bytes) <= max(0.02 * plan.device_peak_bytes, MIB / 64)
