"""Each kind of codes, alone, through `fit`: several iterations equal plain PyTorch with the same codes in its hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import Lossy, fit
from stowage.stages.ir.errors import MIB
from stowage.stages.ir.lossy import KINDS
from stowage.stages.ir.variant import VariantName
from stowage.stages.rewrite.lossy import CODECS
from stowage.stages.trace import trace_step
from tests.api.coded_models import CODED
from tests.api.test_leave_is_not_stored import first_lossy
from tests.matrix import some
from tests.rewrite.packed_by_hooks import Chosen, hooked
from tests.runtime.beside_eager import differences, same

ITERATIONS = 5

OWN = {"relu1bit": "relu", "gelu2bit": "gelu", "silu2bit": "silu", "fixed8_unit": "gated", "top10": "frozen_norms"}
"""The networks that have values for the kinds that are not for any."""

GENERAL = ("linear", "convolutions")
"""The networks on which all other kinds are tried."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"adamw": adamw, "momentum": momentum}

BUDGETS = {"adamw": "97%", "momentum": "60%"}
"""With the second, activations are computed again beside the codes."""

CASES = [
    (kind, network, optimizer)
    for kind in KINDS
    for network in ((OWN[kind],) if kind in OWN else GENERAL)
    for optimizer in OPTIMIZERS
]
KEPT = [("gelu2bit", "gelu", "adamw"), ("int4_group", "convolutions", "momentum"), ("top10", "frozen_norms", "adamw")]


@pytest.mark.parametrize(("kind", "network", "optimizer"), some(CASES, keep=KEPT))
def test_a_kind_trains(
    kind: str, network: str, optimizer: str, fit_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the memory that is predicted, and with the same losses, parameters, buffers, states and random numbers."""
    monkeypatch.setattr("stowage.flows.planning.step.solve_variants", first_lossy)
    (model, batch), (plain, _), make = CODED[network](), CODED[network](), OPTIMIZERS[optimizer]
    trace = trace_step(plain, (batch,), loss=lambda value, _: value)
    step = fit(
        model,
        batch,
        make,
        device_budget=BUDGETS[optimizer],
        loss=lambda value, _: value,
        cache_dir=fit_stores,
        quick=True,
        lossy=Lossy(kind, 100.0),
        say=lambda text: None,
    )
    assert {name for name, _ in VariantName.of(step.plan.variant).parts} & set(CODECS) == {kind}
    assert step.plan.lossy
    assert step.plan.exact == CODECS[kind].exact
    assert (step.plan.gradient_error == 0.0) == CODECS[kind].exact
    chosen, reference, expected = Chosen.of(trace, step.plan.variant), make(plain.parameters()), []
    torch.manual_seed(3)
    for _ in range(ITERATIONS):
        with hooked(chosen) as mode:
            value = plain(batch)
            value.backward()
        assert mode.used == set(chosen.packed) != set()
        reference.step()
        reference.zero_grad()
        expected.append(value.item())
    after = torch.get_rng_state()
    torch.manual_seed(3)
    found = [step(batch).item() for _ in range(ITERATIONS - 1)]
    measured = step.measure(batch)
    assert [*found, measured.loss] == expected
    assert torch.equal(torch.get_rng_state(), after)
    assert differences(model, plain) == []
    assert step.optimizer is not None
    assert same(step.optimizer.state_dict(), reference.state_dict())
    assert step.plan.recomputed_bytes or optimizer == "adamw"
    predicted = step.plan.device_peak_bytes
    assert measured.peak_bytes <= step.plan.device_budget_bytes
    assert abs(measured.peak_bytes - predicted) <= max(0.02 * predicted, MIB / 64)
