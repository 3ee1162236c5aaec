"""`forward`: the loop `criterion(model(x), y)` as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.workload.randomness import seeded
from tests.runtime.beside_eager import differences


def network() -> nn.Sequential:
    with seeded(0):
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pairs(count: int, rows: int = 8) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(rows, 6, generator=generator), torch.randint(0, 4, (rows,), generator=generator)]
        for _ in range(count)
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_criterion_of_model_and_target(accumulate: int, fit_stores: Path) -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model, other = network(), network()
    optimizer = sgd(other.parameters())
    batches = pairs(4)
    step = fit(
        model, batches[0], sgd, device_budget="150%", cache_dir=fit_stores, quick=True, accumulate=accumulate,
        forward=lambda model, batch: criterion(model(batch[0]), batch[1]), say=lambda _: None,
    )  # fmt: skip
    torch.manual_seed(3)
    found = [float(step(b, update=(i + 1) % accumulate == 0)) for i, b in enumerate(batches)]
    torch.manual_seed(3)
    for i, (x, y) in enumerate(batches):
        loss = criterion(other(x), y)
        loss.backward()
        assert float(loss.detach()) == found[i]
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert differences(model, other) == []
    other.eval()
    found_outputs = step.evaluate(batches[0], forward=lambda model, batch: model(batch[0]))
    assert torch.equal(found_outputs, other(batches[0][0]))


def test_two_parts_of_a_loss_and_two_calls_of_the_model(fit_stores: Path) -> None:
    def twice(model: nn.Module, batch: Any) -> torch.Tensor:
        first, second = model(batch["x"]), model(batch["x"])
        found: torch.Tensor = nn.functional.cross_entropy(first, batch["y"]) + (first - second).pow(2).mean()
        return found

    model, other = network(), network()
    optimizer = sgd(other.parameters())
    batches = [{"x": x, "y": y} for x, y in pairs(3)]
    step = fit(
        model,
        batches[0],
        sgd,
        device_budget="150%",
        cache_dir=fit_stores,
        quick=True,
        forward=twice,
        say=lambda _: None,
    )
    torch.manual_seed(3)
    found = [float(step(b)) for b in batches]
    torch.manual_seed(3)
    for batch, value in zip(batches, found):
        loss = twice(other, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss.detach()) == value
    assert differences(model, other) == []


def test_the_sentence_of_a_call_that_fails_says_so(fit_stores: Path) -> None:
    how: dict[str, Any] = {"device_budget": "150%", "cache_dir": fit_stores, "quick": True, "say": lambda _: None}
    with pytest.raises(
        StowageError, match=r"forward=lambda model, batch: criterion\(model\(batch\[0\]\), batch\[1\]\)"
    ):
        fit(network(), pairs(1)[0], sgd, **how)
    with pytest.raises(StowageError, match="forward="):
        fit(network(), pairs(1)[0][0], sgd, **how)  # it returns outputs, no loss
    with pytest.raises(StowageError, match="forward="):
        fit(network(), {"x": pairs(1)[0][0], "y": pairs(1)[0][1]}, sgd, **how)
    with pytest.raises(ParameterError, match="not both"):
        fit(network(), pairs(1)[0], sgd, loss=lambda o, b: o, forward=lambda m, b: m(b[0]).sum(), **how)


def test_a_type_error_of_the_users_own_code_stays_theirs(fit_stores: Path) -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.layer(x).sum() + len(3)  # type: ignore[arg-type]

    with pytest.raises(Exception, match="has no len"):
        fit(Wrong(), pairs(1)[0], sgd, device_budget="150%", cache_dir=fit_stores, quick=True, say=lambda _: None)
