"""Whether an optimizer works per tensor, and what it keeps, is learnt from copies that leave no trace."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from stowage.stages.ir.errors import TraceError
from stowage.stages.optimizers import StateForm, habits_of, kept_states, on_shards, tensors_in
from stowage.stages.optimizers.bench import Bench
from stowage.stages.optimizers.content import leaves_of, same_leaf, snapshot
from stowage.stages.optimizers.quiet import quiet
from stowage.stages.runtime.offload.offloaded_tensor import OffloadedTensor, leave
from tests.optimizers.kinds import ALONE, JOINT, Make, Noisy, ScheduleFree

TORCH: dict[str, Make] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters()),
    "fused AdamW": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "foreach SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2]),
    "a rate in a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3)),
}


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 4))


def generators() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """All that the two hold, tensors by value."""
    names = {id(p): n for n, p in model.named_parameters()}
    found = leaves_of(vars(optimizer), names) | {(n,): p.detach() for n, p in model.named_parameters()}
    return snapshot(found | {(n, "grad"): p.grad for n, p in model.named_parameters()})


def kept_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Learnt before the first step."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {n: p for n, p in model.named_parameters() if id(p) in held}
    forms = {n: StateForm(tuple(p.shape), p.stride(), p.dtype) for n, p in trained.items()}
    kept = kept_states(optimizer, trained, forms, habits_of(optimizer), torch.device("cpu"))
    return sum(s.nbytes for s in [*kept.shared, *(s for of in kept.of.values() for s in of)])


def true_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> int:
    """Of what it really keeps after some steps."""
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(optimizer)}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in own)


@pytest.mark.parametrize("name", [*TORCH, *ALONE, *JOINT])
def test_every_kind(name: str) -> None:
    make = (TORCH | ALONE | JOINT)[name]
    model = small_model()
    optimizer = make(model)
    before, drawn = everything(model, optimizer), generators()
    habits = habits_of(optimizer)
    counted = kept_bytes(model, optimizer)
    after = everything(model, optimizer)
    assert generators()[1:] == drawn[1:]
    assert torch.equal(generators()[0], drawn[0])
    assert after.keys() == before.keys()
    assert [path for path in before if not same_leaf(before[path], after[path])] == []
    assert bool(habits.joint) == (name in JOINT), habits.joint
    assert counted == true_bytes(model, optimizer, 4)


def test_nothing_is_touched_in_the_middle_of_training() -> None:
    for name, make in (ALONE | JOINT | {"AdamW": TORCH["AdamW"]}).items():
        model = small_model()
        optimizer = make(model)
        kept = true_bytes(model, optimizer, 3)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        before = everything(model, optimizer)
        assert bool(habits_of(optimizer).joint) == (name in JOINT)
        assert kept_bytes(model, optimizer) == kept, name
        after = everything(model, optimizer)
        assert [path for path in before if not same_leaf(before[path], after[path])] == [], name


def test_entries_that_an_optimizer_changes_itself() -> None:
    model = small_model()
    assert habits_of(JOINT["counter in the group"](model)).own == {"k", "weight_sum"}
    assert habits_of(ScheduleFree(model.parameters())).own == {"k", "train_mode"}
    assert habits_of(TORCH["AdamW"](model)).own == frozenset()


def test_the_schedule_of_the_original_is_not_stepped() -> None:
    """A schedule puts a `step` over the original's, which a copy must not call."""
    model = small_model()
    optimizer = JOINT["counter in the group"](model)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    assert habits_of(optimizer).joint
    assert optimizer.param_groups[0]["k"] == 0


def test_hooks_make_an_update_joint_and_do_not_run() -> None:
    model = small_model()
    optimizer = TORCH["AdamW"](model)
    ran: list[int] = []
    handle = optimizer.register_step_post_hook(lambda *_: ran.append(1))
    assert habits_of(optimizer).joint == "it has step hooks"
    handle.remove()
    assert habits_of(optimizer).joint == ""
    every = register_optimizer_step_pre_hook(lambda *_: ran.append(2))
    try:
        assert habits_of(optimizer).joint == "it has step hooks"
        kept_bytes(model, optimizer)
        assert list(_global_optimizer_pre_hooks) == [every.id]
    finally:
        every.remove()
    assert ran == []


def test_what_cannot_be_copied_is_named() -> None:
    model = small_model()
    optimizer = Noisy(model.parameters())
    optimizer.log = open(__file__)  # type: ignore[attr-defined]  # noqa: SIM115
    with pytest.raises(TraceError, match="Noisy holds something that cannot be copied"):
        habits_of(optimizer)
    optimizer.log.close()  # type: ignore[attr-defined]


def test_what_cannot_step_is_named() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("call first_step and second_step")

    model = small_model()
    optimizer = Broken(model.parameters(), lr=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(TraceError, match=r"Broken cannot take a step on made-up gradients.*first_step and second_step"):
        habits_of(optimizer)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("kind", sorted(TORCH))
def test_parameters_without_content_are_tried_as_those_with(kind: str) -> None:
    with torch.device("meta"):
        empty = small_model()
    if kind == "fused AdamW":
        pytest.skip("PyTorch's own fused optimizers want parameters with content")
    optimizers = [TORCH[kind](model) for model in (empty, small_model())]
    assert habits_of(optimizers[0]) == habits_of(optimizers[1])
    assert on_shards(optimizers[0]) == on_shards(optimizers[1])


def test_updates_are_made_where_states_are_offloaded() -> None:
    """A fresh copy steps then, and the states stay where they are."""
    parameter = nn.Parameter(torch.ones(6, 4))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    moment = optimizer.state[parameter]["exp_avg"]
    leave(moment, "weight::exp_avg")
    form = StateForm((6, 4), (4, 1), torch.float32)
    with quiet():
        Bench(optimizer, {"weight": parameter}).update({"weight": form}, "cpu", clipped=True)()
    assert optimizer.state[parameter]["exp_avg"] is moment
    assert isinstance(moment, OffloadedTensor)
