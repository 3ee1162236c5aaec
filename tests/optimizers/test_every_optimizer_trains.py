"""Optimizers of every kind under a tight plan, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.errors import MIB, Infeasible, StowageError, TraceError
from stowage.stages.optimizers import tensors_in
from stowage.stages.optimizers.content import same_leaf
from tests.optimizers.kinds import ALONE, JOINT, Counting, Noisy, Projecting, ScheduleFree
from tests.optimizers.small import assert_trains_alike, beside, held, small_batches, small_model, square

Fit = Callable[..., Any]


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, loss=square, say=lambda text: None)


def half_of_activations(model: nn.Module, optimizer: torch.optim.Optimizer, quick: Fit, **more: Any) -> Any:
    """A plan that cannot keep everything."""
    try:
        return quick(model, small_batches(1)[0], optimizer, device_budget="60%", **more)
    except Infeasible as error:
        budget = error.smallest_feasible_bytes * 101 // 100
        return quick(model, small_batches(1)[0], optimizer, device_budget=budget, **more)


@pytest.mark.parametrize("name", [*JOINT, *ALONE])
def test_under_a_tight_plan(name: str, quick: Fit) -> None:
    make = (JOINT | ALONE)[name]
    model, other = small_model(), small_model()
    given = small_batches(5)
    step = half_of_activations(model, make(model), quick)
    assert step.plan.method != "keep_all"
    assert ("run.update_all(" in step.planned.source) == (name in JOINT) == step.updates_jointly
    plain = beside(other, make(other))
    assert_trains_alike(step, plain, given, [True] * 5)
    measured = step.measure(given[0])
    assert measured.peak_bytes <= step.plan.device_budget_bytes
    assert abs(measured.peak_bytes - step.plan.device_peak_bytes) <= max(0.02 * step.plan.device_peak_bytes, MIB / 64)
    states = [s for s in step.planned.trace.storages if s.role == "state"]
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    true = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(step.optimizer)}
    missing = sum(s.nbytes for s in states) - sum(nbytes for pointer, nbytes in true.items() if pointer not in own)
    # Those of a parameter that this step does not use count too: other steps of the model might create them.
    assert 0 <= missing <= sum(s.nbytes for s in states if s.name.startswith("unused"))


@pytest.mark.parametrize("name", ["global norm", "wrapper", "noise"])
def test_with_accumulation_clipping_and_a_schedule(name: str, quick: Fit) -> None:
    make = JOINT[name]
    model, other = small_model(), small_model()
    given = small_batches(6)
    step = quick(model, given[0], make(model), device_budget="75%", accumulate=2, max_grad_norm=0.5)
    plain = beside(other, make(other), max_grad_norm=0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (step.optimizer, plain.optimizer)]

    def after(number: int) -> None:
        if number % 2:
            assert torch.equal(step.grad_norm, plain.norm)
            for schedule in schedules:
                schedule.step()

    assert_trains_alike(step, plain, given, [False, True] * 3, after)
    assert len(step.programs.known) == 2


def test_one_that_has_modes(quick: Fit) -> None:
    """It is planned in whatever mode it is, and left in it; switching it is no reason to plan again."""
    model, other = small_model(), small_model()
    given = small_batches(4)
    optimizer = ScheduleFree(model.parameters())
    step = quick(model, given[0], optimizer, device_budget="75%")
    assert optimizer.param_groups[0]["train_mode"] is False
    with pytest.raises(RuntimeError, match="not in train mode"):
        step(given[0])
    plain = beside(other, ScheduleFree(other.parameters()))
    for number in range(3):
        for each in (optimizer, plain.optimizer):
            each.train()  # type: ignore[union-attr]
        assert_trains_alike(step, plain, given[number : number + 1], [True])
        for each in (optimizer, plain.optimizer):
            each.eval()  # type: ignore[union-attr]
        assert held(model, optimizer).keys() == held(other, plain.optimizer).keys()
    assert len(step.programs.known) == 1


def test_hooks_of_the_step_run_once_an_update(quick: Fit) -> None:
    model, other = small_model(), small_model()
    given = small_batches(3)
    seen: list[tuple[str, float]] = []

    def watched(model: nn.Module, name: str) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def before(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            seen.append((name, float(torch.stack(norms).norm())))

        optimizer.register_step_pre_hook(before)
        return optimizer

    step = quick(model, given[0], watched(model, "mine"), device_budget="75%")
    assert seen == []
    assert_trains_alike(step, beside(other, watched(other, "plain")), given, [True] * 3)
    mine, plain = ([value for name, value in seen if name == which] for which in ("mine", "plain"))
    assert mine == plain
    assert len(mine) == 3


def test_what_it_holds_may_move_between_groups(quick: Fit) -> None:
    """New groups, parameters that change places, and settings with which states appear are planned for; numbers that a
    schedule moves are not."""
    model, other = small_model(), small_model()
    given = small_batches(8)

    def make(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(model.layers.parameters()), lr=1e-2)

    step = quick(model, given[0], make(model), device_budget="90%")
    plain = beside(other, make(other))
    both = [(model, step.optimizer), (other, plain.optimizer)]
    assert_trains_alike(step, plain, given[:1], [True])
    for each, optimizer in both:
        optimizer.add_param_group({"params": list(each.norm.parameters()), "lr": 1e-1})
        each.norm.zero_grad()  # whose gradients had stayed
    assert_trains_alike(step, plain, given[1:3], [True] * 2)
    for _, optimizer in both:
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]
    assert_trains_alike(step, plain, given[3:5], [True] * 2)
    for _, optimizer in both:
        optimizer.param_groups[0]["momentum"] = 0.9
    assert_trains_alike(step, plain, given[5:6], [True])
    assert any(s.name.endswith("::momentum_buffer") for s in step.planned.trace.storages)
    count = len(step.programs.known)
    for _, optimizer in both:
        optimizer.param_groups[0].update(lr=1e-3, momentum=0.8)
    assert_trains_alike(step, plain, given[6:], [True] * 2)
    assert len(step.programs.known) == count


@pytest.mark.parametrize("make", [lambda p: Counting(p), lambda p: Projecting(p), lambda p: Noisy(p)])
def test_a_budget_that_is_too_small_leaves_everything_alone(make: Any, quick: Fit) -> None:
    model = small_model()
    optimizer = make(model.parameters())
    before, state = held(model, optimizer), torch.get_rng_state()
    with pytest.raises(StowageError):
        quick(model, small_batches(1)[0], optimizer, device_budget=1000)
    after = held(model, optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert before.keys() == after.keys()
    assert all(same_leaf(before[path], after[path]) for path in before)


def test_one_that_fails_on_made_up_gradients_is_named_and_left_alone(quick: Fit) -> None:
    class TwoSteps(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("call first_step and second_step")

    model = small_model()
    optimizer = TwoSteps(model.parameters(), lr=0.1)
    before = held(model, optimizer)
    with pytest.raises(TraceError, match="TwoSteps cannot take a step on made-up gradients"):
        quick(model, small_batches(1)[0], optimizer, device_budget="90%")
    after = held(model, optimizer)
    assert all(same_leaf(before[path], after[path]) for path in before)


@pytest.mark.parametrize("name", ["counter in the group", "required arguments", "wrapper"])
def test_a_joint_update_below_a_budget_for_weights(name: str, quick: Fit, tmp_path: Path) -> None:
    """What one update needs at once stays in memory; all else may be offloaded."""
    make = (JOINT | ALONE)[name]
    model, other = small_model(), small_model()
    given = small_batches(3)
    step = half_of_activations(model, make(model), quick, offload_dir=tmp_path)
    assert_trains_alike(step, beside(other, make(other)), given, [True] * 3)


@pytest.mark.parametrize("name", ["counter in the group", "tensors in the group", "required arguments"])
def test_states_are_saved_and_loaded(name: str, quick: Fit, tmp_path: Path) -> None:
    make = (JOINT | ALONE)[name]
    model, other = small_model(), small_model()
    given = small_batches(4)
    step = quick(model, given[0], make(model), device_budget="90%")
    plain = beside(other, make(other))
    assert_trains_alike(step, plain, given[:2], [True] * 2)
    step.save(tmp_path / "checkpoint.safetensors")
    again = small_model()
    later = quick(again, given[0], make(again), device_budget="90%")
    later.load(tmp_path / "checkpoint.safetensors")
    assert_trains_alike(later, plain, given[2:], [True] * 2)


def test_states_that_no_checkpoint_holds_are_named(quick: Fit, tmp_path: Path) -> None:
    model = small_model()
    given = small_batches(2)
    step = quick(model, given[0], Projecting(model.parameters()), device_budget="90%")
    step(given[0])
    with pytest.raises(StowageError, match=r"optimizer → state → \d+ → projector is a Projector"):
        step.save(tmp_path / "checkpoint.safetensors")
    assert list(tmp_path.iterdir()) == []
