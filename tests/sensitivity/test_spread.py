"""How much the gradient varies from batch to batch, with codes and without, as it is told beside their errors."""

from __future__ import annotations

import pytest
import torch

from stowage.stages.rewrite.lossy import Classes, effects
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.sensitivity import StepTensors, gradient_errors, run_trace
from stowage.stages.sensitivity.spread import Spread
from stowage.stages.structure.generators import forked_generators
from stowage.stages.trace import trace_step
from tests.sensitivity.test_batches_not_seen import another
from tests.zoo import ZOO


def variance_of(gradients: list[dict[str, torch.Tensor]]) -> float:
    """Return the variance of whole gradients over their mean square."""
    whole = torch.stack([torch.cat([g.flatten() for g in each.values()]).double() for each in gradients])
    return float(whole.var(0).sum() / whole.square().sum(1).mean())


@pytest.mark.parametrize("elements", [1000, 100_000])
def test_a_sample_has_the_variance_of_all_elements(elements: int) -> None:
    draws = torch.Generator().manual_seed(0)
    batches = [{"a": torch.randn(elements, generator=draws), "b": 3 * torch.randn(7, generator=draws)} for _ in "abcd"]
    spread = Spread()
    for gradients in batches:
        spread.add(gradients)
    whole = torch.stack([torch.cat(list(each.values())).double() for each in batches])
    assert spread.variance() == pytest.approx(float(whole.var(0).sum()), rel=1e-9 if elements == 1000 else 0.05)


def test_the_variance_is_that_of_plain_gradients_with_and_without_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With coarse codes it is another one; what is packed changes the gradient of each batch."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    monkeypatch.setattr("stowage.stages.sensitivity.spread.SAMPLED", 10**9)
    model, batch, loss = ZOO["gpt2"]()
    model.eval()  # no dropout: the gradient varies by the batch alone
    trace = trace_step(model, batch, loss=loss)
    live = [StepTensors.of(model, another(batch, seed)) for seed in range(3)]
    errors = gradient_errors(trace, ["bf16", "int4_tensor"], live)
    with forked_generators():
        plain = variance_of([run_trace(trace, each)[1] for each in live])
        for error in errors:
            packed = Classes(trace).trace(error.kind, error.tensors)
            exact, coded = ([run_trace(t, each)[1] for each in live] for t in (trace, packed))
            scale = sum(float(torch.cat([g.flatten() for g in e.values()]).double().square().sum()) for e in exact) / 3
            own = sum(float(torch.stack([c[n] for c in coded]).double().var(0).sum()) for n in coded[0])
            assert error.variance == pytest.approx(plain, rel=1e-4)
            assert error.coded_variance == pytest.approx(own / scale, rel=1e-4)
    assert any(abs(e.coded_variance / e.variance - 1) > 1e-3 for e in errors if e.kind == "int4_tensor")


def test_of_one_batch_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    model, batch, loss = ZOO["gpt2"]()
    trace = trace_step(model, batch, loss=loss)
    one = gradient_errors(trace, ["bf16"], [StepTensors.of(model, batch)])
    assert all(e.variance == e.coded_variance == 0 for e in one)
    two = gradient_errors(trace, ["bf16"], [StepTensors.of(model, another(batch, seed)) for seed in range(2)])
    assert all("variance" not in text for text in effects(trace, "bf16", one))
    assert all("its variance from batch to batch is" in text for text in effects(trace, "bf16", two))
