"""Activation budgets: what is fixed, and shares of the rest."""

from __future__ import annotations

import pytest

from stowage.stages.ir.activations import activation_share, device_budget, fixed_bytes
from tests.solve.prepared import prepared_zoo


def test_states_are_fixed_and_gradients_where_they_stay() -> None:
    trained, alone = prepared_zoo("gpt2").trace, prepared_zoo("gpt2", "").trace
    parameters = sum(s.nbytes for s in alone.storages if s.role == "parameter")
    states = sum(s.nbytes for s in trained.storages if s.role == "state")
    assert states > 2 * parameters
    assert fixed_bytes(trained) == parameters + states, "updates take every gradient"
    assert fixed_bytes(alone) == 2 * parameters, "every gradient stays"


def test_a_share_and_its_inverse() -> None:
    assert device_budget(100, 300, 0.5) == 200
    assert device_budget(100, 300, 1.0) == 300
    assert activation_share(100, 300, 250) == pytest.approx(0.75)
