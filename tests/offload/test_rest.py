"""An iteration that begins as the last one ended does not look again; whatever is touched in between is noticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from stowage.stages.codegen import manifest_of
from stowage.stages.device.tiers import NullTier
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.trace import MicroBatch
from tests.offload.test_offloaded_training import adamw
from tests.runtime.beside_eager import differences, eager_step, same
from tests.streams.hand_plans import HandMade, HandPlan, Way
from tests.zoo import ZOO

WAYS = {
    "weights": Way(activations=False),
    "everything": Way(),
    "by the CPU": Way(cpu_updates=True),
    "around": Way(around=True),
}
NAME = "tied"


@cache
def made() -> HandMade:
    return HandMade(ZOO[NAME], adamw, MicroBatch())


@cache
def plan_of(way: str) -> HandPlan:
    return made().streaming(WAYS[way])


class Both:
    """Under a plan that moves things, and beside it in plain PyTorch."""

    def __init__(self, way: str) -> None:
        (self.eager, self.batch, self.loss), (self.model, _, _) = ZOO[NAME](), ZOO[NAME]()
        self.eager_optimizer, self.optimizer = adamw(self.eager), adamw(self.model)
        self.offloading = Offloading(NullTier(), self.model, self.optimizer)
        self.program = self.other(way)
        self.looked: list[str] = []
        place = self.offloading.place

        def counted(slot: Any) -> None:
            self.looked.append(slot.name)
            place(slot)

        self.offloading.place = counted  # type: ignore[method-assign]

    def other(self, way: str) -> Program:
        """A program of the same model and tier."""
        plan = plan_of(way)
        known = manifest_of(plan.source, "", "").source_hash
        return bind(
            plan.source, known, f"rest_{known[:8]}.py", plan.trace, self.model, self.optimizer, plan.slots,
            self.offloading,
        )  # fmt: skip

    def train(self, program: Program | None = None) -> int:
        """One iteration of both; how many slots `enter` looked at."""
        self.looked.clear()
        state = torch.get_rng_state()
        expected = eager_step(self.eager, self.batch, self.loss, self.eager_optimizer)
        torch.set_rng_state(state)
        assert same((program or self.program)(self.batch).detach(), expected)
        return len(self.looked)

    def settle(self) -> None:
        """Until an iteration does not look."""
        found = [self.train() for _ in range(4)]
        assert found[0] > 0
        assert found[-1] == 0, "it rests"

    def assert_alike(self) -> None:
        self.offloading.fetch_all()
        assert differences(self.model, self.eager) == []
        assert same(self.optimizer.state_dict(), self.eager_optimizer.state_dict())


def everything_here(both: Both) -> None:
    """As `step.on_device`, whose user changes weights."""
    here = both.offloading.fetch_all()
    for model in (both.model, both.eager):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    both.offloading.forget_copies(here)


def states_replaced(both: Both) -> None:
    """As `load_state_dict` in `step.on_device`."""
    here = both.offloading.fetch_all()
    for optimizer in (both.optimizer, both.eager_optimizer):
        found = optimizer.state_dict()
        for state in found["state"].values():
            state["exp_avg"] = state["exp_avg"] * 0.5
        optimizer.load_state_dict(found)
    both.offloading.forget_copies(here)


def put(both: Both) -> None:
    """As `step.load_model`: new content for a parameter that is offloaded."""
    name, _ = next(iter(both.offloading.offloaded_parameters().items()))
    old = dict(both.eager.named_parameters())[name]
    fresh = torch.full_like(old, 0.01)
    with torch.no_grad():
        old.copy_(fresh)
    both.offloading.put(name, fresh.detach().clone())


def states_forgotten(both: Both) -> None:
    """As `step.load_optimizer`, state by state."""
    both.offloading.forget_states()
    names = {id(p): n for n, p in both.eager.named_parameters()}
    for parameter in both.model.parameters():
        both.optimizer.state.pop(parameter, None)
    own = dict(both.model.named_parameters())
    for parameter, state in both.eager_optimizer.state.items():
        name = names[id(parameter)]
        both.optimizer.state[own[name]]["step"] = state["step"].clone()
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].mul_(0.5)
            both.offloading.put(f"{name}::{key}", state[key].clone())


def sent_down(both: Both) -> None:
    """As a checkpoint does that needs room: what was read goes again."""
    both.offloading.fetch_all()
    for slot in both.program._slots:
        if slot.role != "temporary":
            both.offloading.send_down(slot.name)


def one_fetched(both: Both) -> None:
    name, _ = next(iter(both.offloading.offloaded_parameters().items()))
    both.offloading.fetch(name)


def raised_midway(both: Both) -> None:
    """In the first gradient hook, after some have moved; what has been updated by then is put back in both."""
    before = {n: p.detach().clone() for n, p in both.eager.named_parameters()}

    def hook(parameter: Any) -> None:
        raise RuntimeError("stop")

    state = torch.get_rng_state()
    handles = [p.register_post_accumulate_grad_hook(hook) for p in both.model.parameters()]
    with pytest.raises(RuntimeError, match="stop"):
        both.program(both.batch)
    for handle in handles:
        handle.remove()
    torch.set_rng_state(state)
    both.offloading.fetch_all()
    assert all(torch.equal(p, before[n]) for n, p in both.model.named_parameters())


def lent(both: Both) -> None:
    """Modules are called meanwhile."""
    with both.offloading.lending():
        pass


def another_optimizer(both: Both) -> None:
    both.offloading.fetch_all()
    both.offloading.serve(both.optimizer)


TOUCHES: dict[str, Callable[[Both], None]] = {
    found.__name__: found
    for found in (
        everything_here, states_replaced, put, states_forgotten, sent_down, one_fetched, raised_midway, lent,
        another_optimizer,
    )
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_it_does_not_look_again(way: str) -> None:
    both = Both(way)
    both.settle()
    for _ in range(2):
        assert both.train() == 0
    both.assert_alike()


@pytest.mark.parametrize(
    ("touch", "way"),
    [(t, w) for t in TOUCHES for w in ("everything", "by the CPU") if (t, w) != ("raised_midway", "by the CPU")],
)
def test_what_is_touched_is_noticed(touch: str, way: str) -> None:
    both = Both(way)
    both.settle()
    TOUCHES[touch](both)
    assert both.train() > 0, "it looks"
    assert [both.train() for _ in range(3)][-1] == 0, "and rests again"
    both.assert_alike()


@pytest.mark.parametrize(
    ("one", "two"), [("weights", "everything"), ("everything", "by the CPU"), ("around", "weights")]
)
def test_another_program(one: str, two: str) -> None:
    """Of another shape, or evaluation's: each looks when the other has run."""
    both = Both(one)
    other = both.other(two)
    both.settle()
    for _ in range(2):
        assert both.train(other) > 0
        assert both.train() > 0
    assert [both.train(other) for _ in range(3)][-1] == 0
    assert both.train() > 0
    both.assert_alike()


def test_what_was_moved_is_looked_at_once_more() -> None:
    """An iteration rests when one before it found everything in place."""
    both = Both("everything")
    both.settle()
    everything_here(both)
    assert both.train() > 0
    assert both.train() > 0
    assert both.train() == 0


def test_reading_does_not_end_a_rest() -> None:
    """A checkpoint reads what is offloaded, one tensor after the other."""
    both = Both("weights")
    both.settle()
    contents = Contents(both.model, both.optimizer, both.offloading)
    seen: list[torch.Tensor] = []
    eager = dict(both.eager.named_parameters())
    for name, parameter in both.model.named_parameters():
        contents.lend(parameter, lambda tensor: seen.append(tensor.clone()))
        assert torch.equal(seen[-1], eager[name])
    both.train()
    both.assert_alike()


def test_a_first_update_is_not_rested_on() -> None:
    """States that do not exist yet come in the first iteration: the second one looks, and finds them."""
    both = Both("everything")
    assert both.train() > 0
    assert both.train() > 0
    both.assert_alike()
