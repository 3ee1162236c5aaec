"""What a policy of a user returns is checked in one sentence that names it, and nothing is changed where it fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import Freeze, TrainingStep, fit
from stowage.stages.freezing.policies import most_active
from stowage.stages.freezing.schedule import Schedule
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.freezable import Freezable
from stowage.stages.ir.units import Unit

UNITS = tuple(Unit(name, (f"{name}.weight",)) for name in ("a", "b", "c"))


class Own:
    """Returns what a test gives it."""

    def __init__(self, chosen: Any = ("a",), most: Any = 2, state: Any = None) -> None:
        self.chosen, self.most, self.state, self.refuses = chosen, most, state, False

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Any:
        return self.chosen

    def most_active(self, units: int) -> Any:
        return self.most

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        if self.refuses and state == "of the checkpoint":
            raise ValueError("not mine")


def schedule(policy: Own) -> Schedule:
    return Schedule(Freezable(UNITS, 2), policy, seed=0)


@pytest.mark.parametrize("chosen", [None, 1, "a", [0, "a"], [["a"]], [None]])
def test_what_is_no_list_of_names(chosen: Any) -> None:
    one = schedule(Own(chosen))
    with pytest.raises(ParameterError, match=r"The policy Own returned .* from choose in step 0: return the names"):
        one.active()
    one.policy.chosen = iter(["a", "c"])  # type: ignore[attr-defined]
    assert one.active() == {"a", "c"}


@pytest.mark.parametrize("most", [1.5, None, "2", True, float("nan"), -3])
def test_what_is_no_number_of_units(most: Any) -> None:
    with pytest.raises(
        ParameterError, match=r"The policy Own says .* of most_active\(3\): return a whole number from 0"
    ):
        most_active(Own(most=most), 3, 0.5)


def test_numbers_of_other_libraries_and_more_than_there_are() -> None:
    found = most_active(Own(most=torch.tensor(2)), 3, 0.5)
    assert (type(found), found) == (int, 2)
    assert most_active(Own(most=7), 3, 0.5) == 3


@pytest.mark.parametrize("state", [torch.ones(2), {1, 2}, {"a": b"x"}])
def test_a_state_that_no_file_can_hold(state: Any) -> None:
    with pytest.raises(ParameterError, match="The state_dict of the policy Own has what JSON cannot hold"):
        schedule(Own(state=state)).state_dict()


def test_a_state_that_is_not_taken_changes_nothing() -> None:
    one = schedule(Own(state="its own"))
    one.active()
    one.ended({"a": 0.5})
    before, stored = one.state_dict(), one.state_dict() | {"step": 7, "state": "of the checkpoint"}
    stored["dynamics"] = dict.fromkeys(stored["dynamics"], 0.25)
    one.policy.refuses = True  # type: ignore[attr-defined]
    with pytest.raises(ParameterError, match=r"The policy Own cannot load its state .* \(ValueError: not mine\)"):
        one.load_state_dict(stored)
    assert one.state_dict() == before
    one.policy.refuses = False  # type: ignore[attr-defined]
    one.load_state_dict(stored)
    assert one.state_dict() == stored


def test_what_begins_to_train_after_fit_is_said(fit_stores: Path) -> None:
    """It is in no unit, so that the rate does not hold for it."""
    torch.manual_seed(0)
    model, said = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), list[str]()
    model[0].requires_grad_(False)
    step: TrainingStep = fit(
        model,
        torch.ones(4, 8),
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_budget="1GiB",
        loss=lambda outputs, _: outputs.square().mean(),
        freeze=Freeze(rate=1.0, policy="prefix"),
        cache_dir=fit_stores,
        quick=True,
        say=said.append,
    )
    step(torch.ones(4, 8))
    before = [p.detach().clone() for p in model.parameters()]
    model[0].requires_grad_(True)
    step(torch.ones(4, 8))
    assert [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)] == [False, False, True, True]
    (notice,) = [text for text in said if "of which freeze has its units" in text]
    assert notice.startswith("Parameter '0.bias' gets a gradient in this step")
