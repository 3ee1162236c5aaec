"""A layer normalisation keeps the largest tenth of what it reads in steps that freeze it, and all of it in others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stowage.stages.freezing.projection import Guarded
from stowage.stages.freezing.stored import guarded_plan
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.freezable import UnitKind
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import ALWAYS, bit
from stowage.stages.rewrite import REWRITES, rewritten
from stowage.stages.rewrite.lossy import CODECS, Classes, allowed
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.sensitivity import StepTensors, gradient_errors
from stowage.stages.sensitivity.measure import margin
from stowage.stages.trace import trace_step
from tests.freezing.frozen import adamw, frozen_program, masks, momentum, plain_step
from tests.freezing.pruned import FROZEN, norms_of, pruned
from tests.runtime.beside_eager import differences, same
from tests.solve.prepared import Prepared, prepare_trace
from tests.zoo import ZOO, loss_of

Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the zoo have small values."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)


def traced(name: str, make: Make) -> TraceTables:
    model, batch, loss = ZOO[name]()
    return trace_step(model, batch, loss=loss, optimizer=make(model), label=name)


@pytest.mark.parametrize(
    ("name", "kind", "make"), [("gpt2", "saving", adamw), ("bert", "parameter", adamw), ("gpt2", "block", momentum)]
)
def test_any_mask_trains_as_hooks_do(name: str, kind: UnitKind, make: Make) -> None:
    """Under plans that keep and that recompute, for ten iterations with masks that differ each time."""
    trace = traced(name, make)
    prepared = prepare_trace(rewritten(trace, FROZEN))
    units, paths = units_of(trace, kind), norms_of(trace, FROZEN)
    assert len(paths) == len(REWRITES[FROZEN].sites(trace)) >= 5
    for solved in (prepared.solve(), prepared.smallest()):
        (plain, batch, loss), (model, _, _) = ZOO[name](), ZOO[name]()
        plain_optimizer, own_optimizer = make(plain), make(model)
        program = frozen_program(prepared, solved, units, model, own_optimizer)
        state, used = torch.get_rng_state(), set[int]()
        for number, active in enumerate(masks(units, 10)):
            torch.set_rng_state(state)
            with pruned(plain, paths) as found:
                expected = plain_step(plain, batch, loss, plain_optimizer, units, active)
            used.add(len(found))
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            program.active.choose(active)
            assert same(program(batch).detach(), expected), number
            assert torch.equal(torch.get_rng_state(), after)
            assert differences(model, plain) == [], f"iteration {number} ({active})"
            assert same(own_optimizer.state_dict(), plain_optimizer.state_dict()), number
            state = after
        assert len(used) > 2, "some masks freeze all of them, some a few and some none"


def kept(prepared: Prepared, trace: TraceTables) -> Guarded:
    solved = prepared.solve()
    return guarded_plan(prepared.trace, prepared.nodes, solved.rows, solved.slots, units_of(trace))


def test_the_whole_value_is_there_only_where_the_weight_trains() -> None:
    trace = traced("gpt2", adamw)
    plan = kept(prepare_trace(rewritten(trace, FROZEN)), trace)
    names = [unit.name for unit in plan.units]
    wholes = {storage: guard for own in plan.guards.wholes.values() for storage, guard in own.items()}
    assert len(wholes) == len(REWRITES[FROZEN].sites(trace))
    assert sorted(wholes.values()) == sorted(bit(names.index(path)) for path in norms_of(trace, FROZEN))
    for storage, guard in wholes.items():
        for mask, there in ((ALWAYS | guard, True), (plan_mask(plan) & ~guard, False)):
            read = [n for n in plan.under(mask).nodes if n.phase == "backward" and storage in n.reads]
            ran = {step.node for step in plan.under(mask).steps}
            assert any(n.node in ran for n in read) == there


def plan_mask(plan: Guarded) -> int:
    """The mask under which everything trains."""
    return ALWAYS | sum(bit(i) for i in range(len(plan.units)))


def test_its_error_is_that_of_steps_in_which_it_is_frozen() -> None:
    """All of a class is frozen; what nothing computes then is not counted."""
    model, batch, loss = ZOO["gpt2"]()
    model.eval()
    trace = trace_step(model, batch, loss=loss)
    twice = [StepTensors.of(model, batch)] * 2  # one alone is measured with other weights too
    errors = {e.tensors: e for e in gradient_errors(trace, [FROZEN], twice)}
    members = Classes(trace).members([FROZEN])
    name, ((site, _),) = next((n, own) for (_, n), own in members.items() if len(own) == 1)
    (path,), found = norms_of(trace, f"{FROZEN}[{site}]"), errors[name]
    norm = model.get_submodule(path)
    gradients = []
    for codes in (set[str](), {path}):
        norm.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        with pruned(model, codes) as used:
            loss_of(model, batch, loss).backward()
        assert used == list(codes)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    exact, changed = gradients
    change = sum(float((changed[n] - g).double().square().sum()) for n, g in exact.items())
    whole = sum(float(g.double().square().sum()) for g in exact.values())
    assert 0 < found.squared_error == pytest.approx(margin(2) ** 2 * change / whole, rel=1e-3)


def test_without_freezing_there_is_none() -> None:
    assert FROZEN not in allowed(["top10"], freezes=False)
    assert allowed(["top10"], freezes=True) == ("top10", FROZEN)
    assert allowed(["bf16"], freezes=True) == ("bf16",)
    assert not any(codec.for_freezing for codec in CODECS.values() if codec.name != FROZEN)
