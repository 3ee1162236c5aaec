"""Updates whose counters are on a card, made by the CPU, and how fast those of an optimizer are."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows.api import update_rate as _update_rate
from stowage.flows.api.update_rate import with_own_updates
from stowage.stages.device.rates import at_once
from stowage.stages.device.rates.host import HostRates, measure_update_rate
from stowage.stages.runtime.offload.cpu_updates import CpuUpdates, bring_counters
from tests.cards.attention import CARD

HOW: dict[str, dict[str, Any]] = {
    "default": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True},
}


@pytest.mark.parametrize("how", HOW)
def test_the_cpu_takes_any_adamw(how: str) -> None:
    """`capturable` is for CUDA graphs alone, and refused on the CPU."""
    weight = torch.randn(5, 3)
    held = nn.Parameter(torch.empty(5, 3, device="meta"))
    optimizer = torch.optim.AdamW([held], lr=0.1, **HOW[how])
    lower_tier = CpuUpdates(optimizer)
    found, state = weight.clone(), dict[str, Any]()
    plain = nn.Parameter(weight.clone())
    expected = torch.optim.AdamW([plain], lr=0.1, fused=how == "fused")
    for _ in range(3):
        gradient = torch.randn(5, 3)
        given = found, gradient.clone(), state
        state = lower_tier.start(held, lambda given=given: given, lambda weight, left: dict(left)).result()  # type: ignore[misc]
        plain.grad = gradient.clone()
        expected.step()
        assert torch.equal(found, plain.detach())
    assert optimizer.param_groups[0].get("capturable", False) == (how == "capturable"), "the user's own is as it was"
    assert state["step"].device.type == "cpu"


@pytest.mark.parametrize(("how", "moves"), [("fused", True), ("capturable", True), ("default", False)])
def test_counters_go_where_the_next_update_reads_them(how: str, moves: bool) -> None:
    """A fused kernel would read the host's address on the card. Here the meta device is in the place of that."""
    parameter = nn.Parameter(torch.empty(4, device="meta"))
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(4, device="cpu"))], **HOW[how])
    optimizer.param_groups[0]["params"] = [parameter]
    optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": torch.empty(4, device="meta")}
    bring_counters(optimizer, parameter)
    assert optimizer.state[parameter]["step"].device.type == ("meta" if moves else "cpu")
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"


@pytest.mark.parametrize(
    ("make", "numbers"),
    [(torch.optim.AdamW, 7), (torch.optim.SGD, 3), (lambda p: torch.optim.SGD(p, momentum=0.9), 5)],
    ids=["AdamW", "SGD", "momentum"],
)
def test_traffic_is_the_optimizers(make: Any, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight twice, gradient once, each state twice; an update takes a second here."""
    seconds = itertools.count()
    monkeypatch.setattr(at_once.time, "perf_counter", lambda: float(next(seconds)))
    began: list[int] = []
    rate = measure_update_rate(make, torch.float32, lambda: began.append(1), elements=1 << 12)
    assert rate == pytest.approx(numbers * 4 * (1 << 12), rel=1e-3)
    assert len(began) == 6, "copies start beside each"


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[torch.optim.Optimizer]:
    """Optimizers whose rate was measured; each rate is another."""
    seen: list[torch.optim.Optimizer] = []

    def measured(device: torch.device, make: Any, dtype: torch.dtype) -> HostRates:
        seen.append(make([nn.Parameter(torch.zeros(3, dtype=dtype))]))
        return HostRates(1e9, 1e9, 1e9, 1e9 * len(seen))

    monkeypatch.setattr(_update_rate, "measure_host_rates", measured)
    return seen


def test_plans_know_the_rate_of_the_optimizer_that_trains(rates: list[Any], tmp_path: Path) -> None:
    model, cuda = nn.Linear(4, 4), torch.device("cuda", 0)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True, foreach=False)
    before = copy.deepcopy(adamw.state_dict())
    first = with_own_updates(CARD, adamw, cuda, tmp_path)
    assert first == replace(CARD, cpu_update_bytes_per_s=1e9)
    assert adamw.state_dict() == before
    assert rates[0].param_groups[0]["capturable"] is False
    assert type(rates[0]) is torch.optim.AdamW
    adamw.param_groups[0]["lr"] = 0.2
    assert with_own_updates(CARD, adamw, cuda, tmp_path) == first, "remembered: a rate that changes is another plan"
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert with_own_updates(CARD, sgd, cuda, tmp_path).cpu_update_bytes_per_s == 2e9
    assert len(rates) == 2


def test_others_keep_what_is_described(rates: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    adamw = torch.optim.AdamW(model.parameters())
    cpu = replace(CARD, type="cpu")
    assert with_own_updates(cpu, adamw, torch.device("cpu"), tmp_path) is cpu
    assert with_own_updates(CARD, None, torch.device("cuda"), tmp_path) is CARD

    def refuses(*args: Any) -> HostRates:
        raise RuntimeError("it wants matrices")

    monkeypatch.setattr(_update_rate, "measure_host_rates", refuses)
    assert with_own_updates(CARD, adamw, torch.device("cuda", 0), tmp_path) is CARD
    assert not list(tmp_path.rglob("*.json"))
    assert rates == []
