"""A gradient that is a view of what was computed, as a bias' is, goes down and stays what it is."""

from __future__ import annotations

import pytest

from stowage.stages.trace import MicroBatch
from tests.matrix import some
from tests.offload.test_offloaded_training import momentum
from tests.streams.checking import Job, check, in_random_order
from tests.streams.hand_plans import HandMade, Way
from tests.streams.jobs import piece_of, summed_job
from tests.zoo import ZOO


@pytest.mark.parametrize(
    ("name", "max_grad_norm"),
    some([(name, norm) for name in ("gpt2", "phi", "bert") for norm in (None, 0.01)], keep=[("gpt2", 0.01)]),
)
def test_updates_by_the_cpu(name: str, max_grad_norm: float | None) -> None:
    made = HandMade(ZOO[name], momentum, MicroBatch(max_grad_norm=max_grad_norm))
    plan = made.streaming(Way(cpu_updates=True, any_form=True))
    assert ", form=(" in plan.source
    job = Job(name, ZOO[name], momentum, (piece_of(plan),), max_grad_norm)
    assert check(job, in_random_order(0)).all() == []


@pytest.mark.parametrize("name", some(["gpt2", "phi"], keep=["gpt2"]))
def test_they_wait_offloaded(name: str) -> None:
    job = summed_job(name, "momentum", Way(gradients=True))
    assert check(job, in_random_order(1)).all() == []
