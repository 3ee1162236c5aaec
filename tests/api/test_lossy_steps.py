"""Training with leave for lossy plans equals, bit for bit, plain PyTorch whose hooks keep the same values in codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows import Freeze, Lossy, fit
from stowage.flows.api import planner
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.plan import Option
from stowage.stages.rewrite import is_asked, rewritten
from stowage.stages.rewrite.lossy import described
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.sensitivity import StepTensors, gradient_error, gradient_errors
from stowage.stages.solve import PlanRequest, Solved, Variant, solve_variants
from stowage.stages.trace import trace_step
from tests.freezing.beside import Given, assert_equal_to_plain
from tests.matrix import some
from tests.rewrite.packed_by_hooks import Chosen, hooked
from tests.zoo import ZOO, loss_of

ITERATIONS = 4
CLOSE_BYTES = 1 << 20


@pytest.fixture
def packed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the first lossy plan, whether it is the fastest or not, of small values too."""

    def solve(variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, *known: object) -> Solved:
        del known
        chosen = next(v for v in variants if is_asked(v.name))
        # Alone it is not compared with the recorded trace, which errors are measured of.
        solved = solve_variants([chosen], options, replace(request, max_gradient_error=math.inf, rewrite=""))
        lossy, error = described(variants[0].trace, chosen.name, request.errors)
        return replace(solved, summary=replace(solved.summary, lossy=lossy, gradient_error=error))

    monkeypatch.setattr("stowage.flows.planning.step.solve_variants", solve)
    monkeypatch.setattr(saved_module, "SMALLEST", 64)


@pytest.mark.usefixtures("packed_only")
@pytest.mark.parametrize("name", some(["gpt2", "bert", "vit", "unet"], keep=["vit", "unet"]))
def test_training_equals_hooks(name: str, tmp_path: Path) -> None:
    def adamw(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)  # type: ignore[arg-type]

    (model, batch, loss), (plain, _, _) = ZOO[name](), ZOO[name]()
    trace = trace_step(plain, batch, loss=loss)
    torch.manual_seed(3)
    step = fit(
        model,
        batch,
        adamw,
        device_budget="97%",
        loss=loss,
        cache_dir=tmp_path,
        quick=True,
        lossy=Lossy(["bf16", "int8_tensor"], 0.1),
        say=lambda text: None,
    )
    assert not step.plan.exact
    assert step.plan.lossy
    assert 0 < step.plan.gradient_error <= 0.1
    chosen = Chosen.of(trace, step.plan.variant)
    optimizer = adamw(plain.parameters())
    expected = []
    torch.manual_seed(3)
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        with hooked(chosen) as mode:
            value = loss_of(plain, batch, loss)
            value.backward()
        assert mode.used == set(chosen.packed)
        optimizer.step()
        expected.append(value.item())
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert [step(batch).item() for _ in range(ITERATIONS - 1)] + [step.measure(batch).loss] == expected
    assert torch.equal(torch.get_rng_state(), after)
    different = [n for (n, p), q in zip(model.named_parameters(), plain.parameters()) if not torch.equal(p, q)]
    assert different == []
    measured = step.measure(batch).peak_bytes
    assert measured <= step.plan.device_budget_bytes
    assert abs(measured - step.plan.device_peak_bytes) <= max(CLOSE_BYTES, step.plan.device_peak_bytes // 50)


@pytest.mark.usefixtures("packed_only")
def test_freezing_goes_with_it(tmp_path: Path) -> None:
    """Masks that change each time set `requires_grad` in plain PyTorch, whose hooks keep the same values in codes."""

    def adamw(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)  # type: ignore[arg-type]

    (model, batch, _), (plain, _, _), policy = ZOO["gpt2"](), ZOO["gpt2"](), Given()
    trace = trace_step(plain, batch)
    step = fit(
        model,
        batch,
        adamw,
        device_budget="97%",
        cache_dir=tmp_path,
        quick=True,
        freeze=Freeze(policy=policy),
        lossy=Lossy("bf16", 0.1),
        say=lambda text: None,
    )
    assert not step.plan.exact
    chosen = Chosen.of(trace, step.plan.variant)

    def loss(model: torch.nn.Module, batch: object) -> torch.Tensor:
        with hooked(chosen):
            return loss_of(model, batch, None)  # type: ignore[arg-type]

    assert_equal_to_plain(step, policy, plain, adamw(plain.parameters()), loss, [batch], updates=ITERATIONS)


def test_without_leave_every_plan_is_exact(tmp_path: Path) -> None:
    model, batch, _ = ZOO["gpt2"]()
    step = fit(model, batch, device_budget="95%", cache_dir=tmp_path, quick=True, say=lambda text: None)
    assert step.plan.exact
    assert step.plan.lossy == ()
    assert step.plan.gradient_error == 0.0


def test_leave_is_checked() -> None:
    with pytest.raises(ParameterError, match="lossy has the kind 'int7'"):
        Lossy(["int7"])
    for limit in (-1, float("inf"), float("nan"), True, "1%"):
        with pytest.raises(ParameterError, match=f"max_gradient_error of lossy is {limit!r}: give a number of at"):
            Lossy("all", limit)  # type: ignore[arg-type]
    assert Lossy("int8").kinds == ("int8",)


def test_errors_are_measured_on_the_batches_that_are_given(tmp_path: Path) -> None:
    """They are the first four of a loader, and of the step's own shapes; with none it is said to be one."""
    model, batch, _ = ZOO["gpt2"]()
    trace = trace_step(model, batch)
    others = [{name: (t + n) % 60 for name, t in batch.items()} for n in range(6)]
    wrong = {name: t[:1] for name, t in batch.items()}
    notices: list[str] = []

    def planned(folder: str, lossy: Lossy) -> Sequence[GradientError]:
        found: list[Sequence[GradientError]] = []
        kept = planner.gradient_errors
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "gradient_errors", lambda *a, **k: found.append(kept(*a, **k)) or found[-1])
            fit(
                model,
                batch,
                device_budget="97%",
                cache_dir=tmp_path / folder,
                quick=True,
                lossy=lossy,
                say=notices.append,
            )
        return found[0]

    def measured(*batches: Any) -> Sequence[GradientError]:
        return gradient_errors(trace, ["bf16"], [StepTensors.of(model, each) for each in batches])

    assert planned("one", Lossy("bf16")) == measured(batch)
    assert any("Lossy(batches=loader)" in text for text in notices)
    notices.clear()
    assert planned("some", Lossy("bf16", batches=iter([others[1], wrong, *others[2:]]))) == measured(*others[1:5])
    assert not any("Lossy(batches=loader)" in text for text in notices)


@pytest.mark.usefixtures("packed_only")
def test_the_change_of_the_gradient_is_measured_with_the_weights_of_now(tmp_path: Path) -> None:
    """Nothing of the user's moves meanwhile."""
    torch.manual_seed(0)
    hidden = [torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(64, 8))
    batch = torch.randn(256, 8)

    def loss(outputs: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return (outputs - given.flip(1)).pow(2).mean()

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-2)

    how: dict[str, Any] = {"loss": loss, "cache_dir": tmp_path, "quick": True, "say": lambda text: None}
    step = fit(model, batch, adam, device_budget="90%", lossy=Lossy("int8_tensor", 0.1), **how)
    assert not step.plan.exact
    state, weights = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    at_first = step.gradient_error(batch)
    assert 0 < at_first <= step.plan.gradient_error
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before) and p.grad is None for p, before in zip(model.parameters(), weights))
    for _ in range(20):
        step(batch)
    trace = trace_step(model, batch, loss=loss)
    packed = rewritten(trace, step.plan.variant)
    assert step.gradient_error(batch) == gradient_error(trace, packed, [StepTensors.of(model, batch)]) != at_first


def test_exact_plans_change_nothing(tmp_path: Path) -> None:
    model, batch = torch.nn.Linear(8, 8), torch.randn(4, 8)
    step = fit(model, batch, None, device_budget="110%", loss=lambda out, _: out.sum(), cache_dir=tmp_path, quick=True)
    assert step.gradient_error(batch) == 0.0
