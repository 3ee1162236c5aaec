"""Updates that are put off while weights, states and activations move: no race in any order, the numbers of eager."""

from __future__ import annotations

import pytest

from stowage.flows.planning.by_rules import RulePlan
from stowage.stages.ir.machine import TierState
from stowage.stages.ir.step import Step
from stowage.stages.trace import MicroBatch
from tests.offload.test_offloaded_training import OPTIMIZERS
from tests.streams.checking import Job, check, in_random_order
from tests.streams.hand_plans import HandMade, HandPlan, Way
from tests.streams.jobs import piece_of
from tests.zoo import ZOO


class PutOff(HandMade):
    """Plans by hand whose updates are in few calls."""

    def _finish(self, steps: list[Step], state: TierState) -> HandPlan:
        return super()._finish(self.rules.together(RulePlan(steps, [], state)).steps, state)


@pytest.mark.parametrize(
    ("name", "optimizer", "way", "max_grad_norm", "seed"),
    [
        ("in_place", "adamw", Way(), None, 0),
        ("resnet", "momentum", Way(activations=False, ahead=1, lag=0), 0.1, 1),
        ("batchnorm", "adamw", Way(ahead=6, lag=4, around=True), None, 2),
        ("in_place", "adamw", Way(), 0.1, 3),
    ],
)
def test_put_off(
    name: str, optimizer: str, way: Way, max_grad_norm: float | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.streams.hand_plans.SMALLEST", 2048)  # what is small stays, and is updated together
    made = PutOff(ZOO[name], OPTIMIZERS[optimizer], MicroBatch(max_grad_norm=max_grad_norm))
    plan = made.streaming(way)
    assert "run.update_together(" in plan.source
    assert "run.reload(" in plan.source
    job = Job(f"{name}, put off", ZOO[name], OPTIMIZERS[optimizer], (piece_of(plan),), max_grad_norm)
    assert check(job, in_random_order(seed)).all() == []
